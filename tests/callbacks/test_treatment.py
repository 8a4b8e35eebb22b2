"""What a micro-batch keeps on the device, with blocks recomputed, offloaded, both or neither, counted by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from offload.simulated import SimulatedDevice
from torch import Tensor, nn

from lightning_gacp.callbacks.treatment import MicroBatchMemory, MicroBatchMeter, offloaded_bytes, treatments
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.offload import offload_blocks

WIDTH, INNER, ROWS = 8, 32, 5
INSIDE = 2 * ROWS * INNER * 4  # what a block saves between its products: before and after the activation function
INPUT = ROWS * WIDTH * 4


class Block(nn.Module):
    """Two products with an activation function between them, and a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def model() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(4)))


def measured(net: nn.Module) -> MicroBatchMemory:
    meter = MicroBatchMeter(net)
    loss = net(torch.randn(ROWS, WIDTH)).sum()
    meter.close()
    result = meter.result()
    loss.backward()
    return result


@contextmanager
def applied(net: nn.Module, device: SimulatedDevice, **what: Any) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(device)
        if "every_n_layers" in what:
            stack.enter_context(checkpoint_blocks(net, every_n_layers=what["every_n_layers"]))
        if "fraction" in what:
            settings = {"min_bytes": 0, "keep_last": 0}
            stack.enter_context(offload_blocks(net, fraction=what["fraction"], device=device, **settings))
        yield


CASES = {
    # what is applied: bytes kept on the device, bytes on the host
    "nothing": ({}, 4 * (INSIDE + INPUT), 0),
    "every second recomputed": ({"every_n_layers": 2}, 2 * INSIDE + 4 * INPUT, 0),
    "every second offloaded": ({"fraction": 0.5}, 2 * (INSIDE + INPUT), 2 * (INSIDE + INPUT)),
    "all recomputed, inputs offloaded": ({"every_n_layers": 1, "fraction": 1.0}, 0, 4 * INPUT),
}


@pytest.mark.parametrize(("what", "on_device", "on_host"), CASES.values(), ids=CASES.keys())
def test_bytes_of_a_micro_batch(what: dict[str, Any], on_device: int, on_host: int) -> None:
    """Before and after, by hand: whatever is done, the figure without it is that of the plain model."""
    net, device = model(), SimulatedDevice(0)
    with applied(net, device, **what):
        result = measured(net)
        assert offloaded_bytes(net) == on_host
    assert result.saved_without == 4 * (INSIDE + INPUT)
    assert (result.saved, result.offloaded) == (on_device, on_host)


def test_operations_that_are_repeated() -> None:
    with checkpoint_blocks(net := model(), every_n_layers=3):  # blocks 0 and 3
        result = measured(net)
    one = 2 * 2 * ROWS * WIDTH * INNER
    assert (result.recomputed_flops, result.block_flops) == (2 * one, 4 * one)


def test_words() -> None:
    net = nn.ModuleDict({"body": model(), "head": nn.Linear(WIDTH, 1)})
    with checkpoint_blocks(net, every_n_layers=2):
        assert [(t.block.name, t.words) for t in treatments(net)] == [
            ("body.0", "recomputed"),
            ("body.1", "kept"),
            ("body.2", "recomputed"),
            ("body.3", "kept"),
        ]
    assert {t.words for t in treatments(net)} == {"kept"}


def test_blocks_of_the_users_choice_replace_those_we_find() -> None:
    """A module that holds the chosen ones is no block beside them."""
    net = model()
    with checkpoint_blocks(net, blocks="*.up"):
        assert [t.block.name for t in treatments(net)] == [f"{place}.up" for place in range(4)]


def test_a_model_without_blocks() -> None:
    assert treatments(nn.Linear(2, 2)) == []
    result = measured(nn.Linear(WIDTH, 3))
    assert result.saved == result.saved_without == INPUT
