"""Every model of the table: its blocks are found, and it trains bit for bit as without checkpointing."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from checkpointing.blocks_page import PAGE, page, stacks_of
from checkpointing.families import TRANSFORMERS, Batch, Family, loss_of
from checkpointing.models import LiveBytes, SavedBytes, assert_same_training
from checkpointing.structures import STRUCTURES
from lightning_gacp.blocks import find_blocks
from lightning_gacp.checkpointing import checkpoint_blocks


def case(name: str, family: Family) -> object:
    return pytest.param(family, id=name)


EVERY = [case(*item) for item in {**TRANSFORMERS, **STRUCTURES}.items()]
HUGGINGFACE = [case(*item) for item in TRANSFORMERS.items()]

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.mark.parametrize("family", EVERY)
def test_blocks_are_found_without_being_told(family: Family) -> None:
    assert stacks_of(family) == family.stacks


def test_the_page_about_blocks_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python tests/checkpointing/blocks_page.py`"


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("settings", [{}, {"every_n_layers": 2}, {"policy": "save_matmuls"}], ids=str)
def test_three_steps_are_bit_equal(family: Family, settings: dict) -> None:
    assert_same_training(family.make(), [family.batch() for _ in range(3)], loss_of, **settings)


@pytest.mark.parametrize("family", EVERY)
def test_blocks_save_exactly_their_inputs(family: Family) -> None:
    model, batch = family.make(), family.batch()
    inputs: dict[int, int] = {}
    alive = []

    def note_inputs(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                alive.append(leaf)
                inputs[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()

    class InBlocks(SavedBytes):
        def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
            return super()._pack(tensor) if inside else tensor.detach()

    inside: list[bool] = []
    for block in find_blocks(model):
        block.module.register_forward_pre_hook(note_inputs, with_kwargs=True)
        block.module.register_forward_pre_hook(lambda *_: inside.append(True))
        block.module.register_forward_hook(lambda *_: inside.clear())
    with checkpoint_blocks(model), InBlocks(model) as saved:
        alive.append(loss_of(model, batch))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert saved.storages == {pointer: size for pointer, size in inputs.items() if pointer not in weights}


def alive_and_peak(model: nn.Module, batch: Batch) -> tuple[int, int]:
    """Bytes alive between forward and backward, and the most at any time of a step."""
    torch.manual_seed(3)
    with LiveBytes() as live:
        loss = loss_of(model, batch)
        waiting = live.now
        loss.backward()
    model.zero_grad()
    return waiting, live.peak


def with_their_own(model: nn.Module) -> nn.Module:
    """A copy that Hugging Face checkpoints."""
    reference = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name of the method has changed and will again
        reference.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return reference


@pytest.mark.parametrize("family", HUGGINGFACE)
def test_never_more_bytes_than_huggingface_itself(family: Family) -> None:
    """Counts whatever is alive, so what Hugging Face holds in closures is in."""
    model, batch = family.make(), family.batch()
    reference = with_their_own(model)
    checkpoint_blocks(model)
    ours, theirs = alive_and_peak(model, batch), alive_and_peak(reference, batch)
    assert ours[1] <= theirs[1]
    if "SwinModel" not in type(model).__name__:  # see the next test
        assert ours[0] <= theirs[0]


def step_flops(model: nn.Module, batch: Batch) -> int:
    with FlopCounterMode(display=False) as counter:
        loss_of(model, batch).backward()
    model.zero_grad()
    return counter.get_total_flops()


def test_layers_of_swin_are_computed_three_times_by_huggingface() -> None:
    """It checkpoints stages and, inside them, layers. The layers alone have the same peak and compute less.

    What waits between forward and backward is more, and not what limits the batch. Whoever wants theirs applies both.
    """
    family = TRANSFORMERS["Swin"]
    model, batch = family.make(), family.batch()
    reference = with_their_own(model)
    theirs, their_flops = alive_and_peak(reference, batch), step_flops(reference, batch)
    checkpoint_blocks(model)
    assert alive_and_peak(model, batch)[1] == theirs[1]
    assert step_flops(model, batch) < 0.9 * their_flops
    checkpoint_blocks(model, blocks="SwinStage")
    assert alive_and_peak(model, batch) == theirs
    assert step_flops(model, batch) == their_flops
