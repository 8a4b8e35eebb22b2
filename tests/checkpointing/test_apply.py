"""What `checkpoint_blocks` changes, refuses and gives back."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.utils import parametrizations

from checkpointing.models import LM, MLPBlock, assert_equal, saved_bytes, train
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.wrapping import layer_of

TOKENS = torch.arange(10).view(2, 5)


def outside(model: nn.Module) -> tuple:
    return (
        list(model.state_dict()),
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_buffers()],
        [(name, type(module).__name__) for name, module in model.named_modules()],
        repr(model),
    )


def test_state_dict_and_names_are_unchanged() -> None:
    model = LM(MLPBlock, 4)
    before = outside(model)
    applied = checkpoint_blocks(model, every_n_layers=2)
    assert applied.names == ["layers.0", "layers.2"]
    assert outside(model) == before
    assert all(isinstance(layer, MLPBlock) for layer in model.layers)
    model.load_state_dict(LM(MLPBlock, 4).state_dict())
    LM(MLPBlock, 4).load_state_dict(model.state_dict())


def test_remove_gives_every_class_back() -> None:
    model = LM(MLPBlock, 4)
    attributes = [set(layer.__dict__) for layer in model.layers]
    applied = checkpoint_blocks(model)
    applied.remove()
    applied.remove()
    assert all(type(layer) is MLPBlock for layer in model.layers)
    assert [set(layer.__dict__) for layer in model.layers] == attributes
    with pytest.raises(KeyError), checkpoint_blocks(model):
        raise KeyError
    assert all(type(layer) is MLPBlock for layer in model.layers)
    checkpoint_blocks(model)  # and it can be applied again


def test_a_deep_copy_is_checkpointed_and_independent() -> None:
    """A copy, as weight averaging makes it, must run its own weights and survive the removal from the original."""
    model = LM(MLPBlock, 4)
    plain_bytes = saved_bytes(model, TOKENS)
    applied = checkpoint_blocks(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    reference = LM(MLPBlock, 4)
    reference.load_state_dict(copied.state_dict())
    assert saved_bytes(copied, TOKENS) == saved_bytes(model, TOKENS) < plain_bytes
    applied.remove()
    assert saved_bytes(model, TOKENS) == plain_bytes > saved_bytes(copied, TOKENS)
    assert_equal(train(copied, [TOKENS]), train(reference, [TOKENS]))


def test_a_copy_is_released_by_its_own_call() -> None:
    model = LM(MLPBlock, 2)
    checkpoint_blocks(model)
    copied = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"`layers\.0` is checkpointed already"):
        checkpoint_blocks(copied)


@pytest.mark.parametrize("n", [0, -3])
def test_every_n_layers_below_one(n: int) -> None:
    model = LM(MLPBlock, 2)
    with pytest.raises(ValueError, match=f"`every_n_layers={n}` must be at least 1"):
        checkpoint_blocks(model, every_n_layers=n)
    assert type(model.layers[0]) is MLPBlock


def test_nothing_matched() -> None:
    with pytest.raises(ValueError, match=r"`blocks='decoder\.\*'` matches no module of `LM`.*`layers\.\*`: 2 x `MLPBl"):
        checkpoint_blocks(LM(MLPBlock, 2), blocks="decoder.*")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"policy": "matmuls"}, ValueError, "`policy='matmuls'` must be `full`, `save_matmuls` or a function"),
        ({"policy": 3}, TypeError, "`policy=3` must be `full`"),
        ({"determinism_check": "strict"}, ValueError, "`determinism_check='strict'` must be one of"),
        ({"blocks": 3}, TypeError, "`blocks` takes"),
    ],
)
def test_bad_settings(settings: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        checkpoint_blocks(LM(MLPBlock, 2), **settings)


def test_a_block_that_cannot_be_wrapped_leaves_the_others_alone() -> None:
    model = LM(MLPBlock, 3)
    model.layers[2].forward = model.layers[2].forward
    with pytest.raises(ValueError, match=r"`layers\.2` cannot be checkpointed: `MLPBlock\.forward` was replaced"):
        checkpoint_blocks(model)
    assert all(type(layer) is MLPBlock for layer in model.layers)
    assert all("_gacp_layers" not in layer.__dict__ for layer in model.layers)


def test_a_parametrized_block_is_named() -> None:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"`0` cannot be checkpointed: .* is parametrized itself"):
        checkpoint_blocks(model, blocks="0")


def test_blocks_in_a_checkpoint_wrapper() -> None:
    """PyTorch's own wrapper, found as a block or around one, would recompute twice."""
    model = LM(MLPBlock, 2)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, MLPBlock)
    )
    for blocks in (None, MLPBlock):
        with pytest.raises(ValueError, match=r"inside a `CheckpointWrapper` already"):
            checkpoint_blocks(model, blocks=blocks)


@pytest.mark.parametrize("flag", ["gradient_checkpointing", "grad_checkpointing"])
def test_models_with_a_flag_of_their_own(flag: str) -> None:
    model = LM(MLPBlock, 2)
    setattr(model, flag, True)
    with pytest.raises(ValueError, match=f"`layers.0` is checkpointed already: `{flag}` is True"):
        checkpoint_blocks(model)
    setattr(model, flag, False)
    checkpoint_blocks(model)


def test_two_selections_of_one_model() -> None:
    model = LM(MLPBlock, 4)
    first = checkpoint_blocks(model, blocks="layers.0")
    second = checkpoint_blocks(model, blocks=["layers.2", "layers.3"])
    first.remove()
    assert layer_of(model.layers[0], "checkpoint") is None
    assert second.names == ["layers.2", "layers.3"]
    assert layer_of(model.layers[3], "checkpoint") is not None
