"""Ranks that see the same batch: their items count once, and gradients on meshes lie beside plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_gacp import GACPModelParallelStrategy
from tests.strategies.models import (
    HIDDEN,
    VOCABULARY,
    Automatic,
    Manual,
    big_batch_gradients,
    loader,
    masked_mean,
    quiet_trainer,
    ragged_batches,
    relative_error,
)
from tests.strategies.on_ranks import on_ranks

CYCLE = 3
LENGTHS = ([6, 2, 0, 4, 1, 7, 3, 0], [3, 0, 8, 2, 6, 4, 9, 1])
BATCHES = [ragged_batches(lengths, seed=seed) for seed, lengths in enumerate(LENGTHS)]


def make_wide_net() -> nn.Module:
    """Two linear layers in a row, for tensor parallelism to cut between."""
    torch.manual_seed(1)
    layers = [nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN)]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, VOCABULARY)).double()


def made(cls: type[Automatic], sharded: bool) -> Automatic:
    class Made(cls):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__(loss=masked_mean)
            self.net = make_wide_net()

        def configure_model(self) -> None:
            mesh = self.device_mesh["tensor_parallel"]
            if mesh.size() > 1 and not isinstance(self.net[1].weight, DTensor):
                parallelize_module(self.net, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
            if sharded:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            gradients = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in self.net.parameters()]
            self.seen.append(gradients)

    return Made()


def train(rank: int, data_ranks: int, tensor_ranks: int, sharded: bool) -> Any:
    found = []
    for cls in (Automatic, Manual) if data_ranks == 1 else (Manual,):
        module = made(cls, sharded)
        strategy = GACPModelParallelStrategy(
            accumulate_grad_batches=CYCLE,
            num_items="labels",
            data_parallel_size=data_ranks,
            tensor_parallel_size=tensor_ranks,
        )
        trainer = quiet_trainer(strategy=strategy, devices=data_ranks * tensor_ranks, use_distributed_sampler=False)
        trainer.fit(module, loader(BATCHES[rank // tensor_ranks]))
        assert strategy.cycle_result is not None
        found.append(([[g.numpy() for g in step] for step in module.seen], strategy.cycle_result.total_items))
    return found


@pytest.mark.parametrize(
    ("data_ranks", "tensor_ranks", "sharded"),
    [(1, 1, True), (1, 2, False), (2, 2, True)],
    ids=["one device", "tensor parallel", "tensor parallel and FSDP2"],
)
def test_cycle_equals_one_big_batch(data_ranks: int, tensor_ranks: int, sharded: bool) -> None:
    """Counted on every rank, the items would be too many by the tensor-parallel ranks; some micro-batches have none."""
    net, expected = make_wide_net(), []
    for start in range(0, len(LENGTHS[0]), CYCLE):
        step = big_batch_gradients(net, [b for rank in range(data_ranks) for b in BATCHES[rank][start : start + CYCLE]])
        expected.append(step)
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), step, strict=True):
                parameter -= 0.1 * gradient
    ranks = data_ranks * tensor_ranks
    for found in on_ranks(train, data_ranks, tensor_ranks, sharded, ranks=ranks):
        for seen, total_items in found:
            assert total_items == sum(sum(LENGTHS[rank][6:]) for rank in range(data_ranks))
            assert len(seen) == len(expected)
            for gradients, wanted in zip(seen, expected, strict=True):
                assert relative_error([torch.from_numpy(g) for g in gradients], wanted) < 1e-12
