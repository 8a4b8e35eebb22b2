"""The costs of a block from fake tensors, against the bytes and operations of a real forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_gacp.blocks import find_blocks
from lightning_gacp.callbacks.block_costs import BlockCost, BlockCosts, measure
from lightning_gacp.callbacks.saved_bytes import SavedBytes
from lightning_gacp.checkpointing import checkpoint_blocks


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))


class Masked(nn.Module):
    """Takes a mask by keyword and a flag; its weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, *, mask: Tensor, twice: bool) -> Tensor:
        x = self.first(x).masked_fill(mask, 0.0)
        return self.second(x).exp() if twice else x


CASES = {
    "transformer layer": (encoder_layer, (torch.randn(2, 5, 16),), {}),
    "batch norm": (convolution, (torch.randn(2, 3, 6, 6),), {}),
    "keywords, tied weights": (Masked, (torch.randn(4, 8),), {"mask": torch.zeros(4, 8).bool(), "twice": True}),
}


@pytest.mark.parametrize(("make", "args", "kwargs"), CASES.values(), ids=CASES.keys())
def test_equal_to_a_real_forward(make: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Bytes and operations are those of the block itself, and nothing of it has changed: statistics, random numbers."""
    block = make()
    state = {name: value.clone() for name, value in block.state_dict().items()}
    random_numbers = torch.get_rng_state()
    cost = measure(block, args, kwargs)
    assert torch.equal(torch.get_rng_state(), random_numbers)
    for name, value in block.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert cost is not None

    counter = FlopCounterMode(display=False)
    tensors = [*args, *(value for value in kwargs.values() if isinstance(value, Tensor))]
    with counter, SavedBytes([*block.parameters(), *block.buffers(), *tensors]) as saved:
        output = block(*args, **kwargs)
    held_by_the_next = output.untyped_storage().nbytes() if output.grad_fn.name() == "ExpBackward0" else 0
    assert cost.saved_bytes == saved.total - held_by_the_next > 0
    assert cost.flops == counter.get_total_flops() > 0
    assert cost.input_bytes == sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_hooks_are_not_run_on_fake_tensors() -> None:
    """A user's hook must never see a tensor without values."""
    block, seen = convolution(), []
    block[0].register_forward_hook(lambda *_: seen.append(1))
    assert measure(block, (torch.randn(1, 3, 4, 4),), {}) is not None
    assert seen == []


class Cache:
    """Something a block could write to."""


def test_opaque_arguments_are_left_alone() -> None:
    """A block that is called with a cache is not tried: the cache would be written to."""
    calls = []

    class Block(nn.Module):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            calls.append(cache)
            return x

    assert measure(Block(), (torch.randn(2),), {"cache": Cache()}) is None
    assert calls == []


def test_what_fake_tensors_cannot_follow_is_unknown() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.sum())  # reads a value

    assert measure(Block(), (torch.randn(2),), {}) is None


def test_costs_of_many_blocks() -> None:
    """One block of each kind is measured, with what is recomputed measured as if it were not; the hooks go again."""
    model = nn.Sequential(*(encoder_layer() for _ in range(4)))
    applied = checkpoint_blocks(model, every_n_layers=2)
    costs = BlockCosts(find_blocks(model))
    x = torch.randn(2, 5, 16)
    model(x)
    costs.close()
    applied.remove()
    one = measure(model[0], (x,), {})
    assert one is not None
    assert costs.of(["0", "2"]) == BlockCost(2 * one.saved_bytes, 2 * one.input_bytes, 2 * one.flops)
    assert costs.of([]) == BlockCost(0, 0, 0)
    assert not any(part._forward_pre_hooks for part in model.modules())
