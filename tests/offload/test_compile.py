"""With ``torch.compile`` the inside of the blocks is compiled, the engine is not, and nothing runs eager in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_gacp.offload import offload_blocks

from .models import Adapter, gradients, same
from .simulated import SimulatedDevice

# The compiler looks at `.grad` of whatever it is given, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def models() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    plain, model = (nn.Sequential(*(Adapter() for _ in range(3))) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    return plain, model


@pytest.mark.parametrize("way", ["whole model", "blocks", "blocks before the offload"])
def test_the_inside_of_the_blocks_is_compiled_and_tensors_are_moved(way: str) -> None:
    """pytorch/pytorch#116221, #113263: with hooks nothing was compiled, and nothing said so."""
    plain, model = models()
    device, counter = SimulatedDevice(), CompileCounterWithBackend("aot_eager")
    if way == "blocks before the offload":
        for block in model:
            block.compile(backend=counter)
    applied = offload_blocks(model, Adapter, min_bytes=1, keep_last=0, device=device)
    if way == "blocks":
        for block in model:
            block.compile(backend=counter)
    run: Any = torch.compile(model, backend=counter) if way == "whole model" else model
    for _ in range(2):
        x = torch.ones(2, 8)
        plain(x).square().sum().backward()
        run(x).square().sum().backward()
    assert same(gradients(plain), gradients(model))
    # Two graphs serve the three blocks, as the first one's input needs no gradient. Each has all six operations: base,
    # down, up, two sums and tanh.
    assert (counter.frame_count, counter.op_count) == (2, 12)
    assert applied.engine.stats()["offloaded_tensors"] >= 2 * 3


def test_fullgraph_is_refused_with_the_reason() -> None:
    _, model = models()
    offload_blocks(model, Adapter, min_bytes=1, keep_last=0, device=SimulatedDevice())
    with pytest.raises(Unsupported, match=r"the graph breaks at each block.*Use `fullgraph=False`"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 8))
