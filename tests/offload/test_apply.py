"""Putting offload on and off: what it refuses, what it leaves as it was, and checkpointing on the same block."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_gacp.blocks import find_blocks
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.offload import offload_blocks, offload_selected

from .models import Adapter, batch, build, gradients, same
from .simulated import SimulatedDevice


def test_without_an_accelerator_nothing_happens_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Hugging Face 5.24: ``offload=True`` raises on a machine without an accelerator."""
    plain, model = build("transformer"), build("transformer")
    with caplog.at_level(logging.INFO, logger="lightning_gacp"):
        applied = offload_blocks(model, device=None)
    assert [record.getMessage() for record in caplog.records] == [
        "Activation offload has no effect here: there is no accelerator with memory of its own to move activations "
        "from. "
        "The numbers are the same."
    ]
    assert applied.names == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    for one in (plain, model):
        one(batch()).sum().backward()
    assert same(gradients(plain), gradients(model))
    assert not applied.engine.active and applied.engine.stats()["offloaded_bytes"] == 0
    applied.remove()


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])
def test_other_ranks_say_nothing(
    variable: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    offload_blocks(build("LoRA"), "blocks.*", device=None)
    assert caplog.records == []


def test_names_state_and_class_are_unchanged_and_given_back() -> None:
    model, device = build("transformer"), SimulatedDevice()
    before = list(model.state_dict()), [name for name, _ in model.named_modules()], type(model.blocks[0])
    with offload_blocks(model, "blocks.*", fraction=0.5, device=device) as applied:
        assert applied.names == ["blocks.0", "blocks.2"]
        assert isinstance(model.blocks[0], before[2]) and type(model.blocks[0]) is not before[2]
        assert type(model.blocks[1]) is before[2]
        assert (list(model.state_dict()), [name for name, _ in model.named_modules()]) == before[:2]
    assert type(model.blocks[0]) is before[2]
    applied.remove()


def test_a_deep_copy_offloads_its_own_weights_and_a_pickle_is_plain() -> None:
    model, device = build("LoRA"), SimulatedDevice()
    offload_blocks(model, "blocks.*", min_bytes=1, device=device)
    twin, plain = copy.deepcopy(model), build("LoRA")
    for one in (twin, plain):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(2)
    plain(batch()).square().sum().backward()
    with device:
        twin(batch()).square().sum().backward()
    assert same(gradients(plain), gradients(twin)) and device.copies != []
    assert all(parameter.grad is None for parameter in model.parameters())
    assert type(pickle.loads(pickle.dumps(model)).blocks[0]) is Adapter


@pytest.mark.parametrize("offload_first", [True, False])
def test_on_one_block_offload_is_outside_whatever_comes_first(offload_first: bool) -> None:
    plain, model, device = build("LoRA"), build("LoRA"), SimulatedDevice()
    steps = [
        lambda: offload_blocks(model, "blocks.*", min_bytes=1, keep_last=0, device=device),
        lambda: checkpoint_blocks(model, blocks="blocks.*"),
    ]
    for step in steps if offload_first else reversed(steps):
        step()
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    model.blocks[0].base.register_forward_hook(count)
    plain(batch()).square().sum().backward()
    with device:
        model(batch()).square().sum().backward()
    assert same(gradients(plain), gradients(model))
    assert runs == 2, "recomputed once"
    assert [way for way, _ in device.copies].count("out") == 3, "the inputs of the blocks and nothing else"


def test_offload_inside_a_checkpointed_block_is_an_error() -> None:
    model, device = build("mixture of experts"), SimulatedDevice()
    checkpoint_blocks(model, blocks="blocks.*")
    with pytest.raises(ValueError, match=r"`blocks.0.experts.0` is offloaded inside a module that is checkpointed"):
        offload_blocks(model, "blocks.?.experts.?", device=device)
    assert type(model.blocks[0].experts[0]) is nn.Sequential


def test_offload_inside_any_checkpoint_is_an_error_when_it_runs() -> None:
    """Whatever made the checkpoint, and in whatever order: nothing would be recomputed."""
    model, device = build("LoRA"), SimulatedDevice()
    offload_blocks(model, "blocks.*", device=device)
    with device, pytest.raises(ValueError, match=r"`blocks.0` is offloaded inside a module that is checkpointed"):
        checkpoint(lambda x: model.blocks[0](x), torch.ones(2, 8), use_reentrant=False)


def test_a_block_is_offloaded_once() -> None:
    model, device = build("LoRA"), SimulatedDevice()
    offload_blocks(model, "blocks.1", device=device)
    with pytest.raises(ValueError, match=r"`blocks.1` is offloaded already"):
        offload_blocks(model, "blocks.*", device=device)
    assert type(model.blocks[0]) is Adapter, "and nothing was changed before the error"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"blocks": "nothing.*"}, ValueError, "`blocks='nothing.\\*'` matches no module"),
        ({"fraction": "50%"}, TypeError, "`fraction='50%'` must be a number"),
        ({"fraction": 0}, ValueError, "`fraction=0` must be above 0"),
        ({"fraction": 2}, ValueError, "`fraction=2` must be above 0 and at most 1"),
        ({"min_bytes": -1}, ValueError, "`min_bytes=-1` must not be negative"),
        ({"keep_last": -1}, ValueError, "`keep_last=-1` must not be negative"),
        ({"prefetch": -2}, ValueError, "`prefetch=-2` must not be negative"),
        ({"max_host_bytes": -1}, ValueError, "`max_host_bytes=-1` must not be negative"),
        ({"keep_last": 0.5}, TypeError, "`keep_last=0.5` must be an integer"),
        ({"prefetch": None}, TypeError, "`prefetch=None` must be an integer"),
    ],
)
def test_bad_input_gets_one_clear_error_also_without_an_accelerator(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    for device in (None, SimulatedDevice()):
        with pytest.raises(error, match=message):
            offload_blocks(build("LoRA"), **{"blocks": "blocks.*", **arguments}, device=device)


def test_selected_blocks_are_exactly_those_given() -> None:
    model, device = build("LoRA"), SimulatedDevice()
    blocks = find_blocks(model, "blocks.*")[1:]
    applied = offload_selected(model, blocks, min_bytes=1, device=device)
    assert applied.names == ["blocks.1", "blocks.2"]
    assert type(model.blocks[0]) is Adapter


def test_keep_last_beyond_the_number_of_blocks_moves_nothing() -> None:
    model, device = build("LoRA"), SimulatedDevice()
    offload_blocks(model, "blocks.*", min_bytes=1, keep_last=9, device=device)
    with device:
        model(batch()).sum().backward()
    assert device.copies == []
