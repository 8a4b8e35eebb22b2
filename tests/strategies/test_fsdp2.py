"""FSDP2 on two CPU ranks, reducing at every micro-batch or once a cycle: the step is the big batch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_gacp import GACPModelParallelStrategy
from tests.strategies.models import Automatic, Manual, loader, masked_mean, quiet_trainer, relative_error
from tests.strategies.on_ranks import on_ranks
from tests.strategies.test_ddp import BATCHES, BOTH, MODULES, reference_run


class _Shards:
    def configure_model(self: Any) -> None:
        mesh = self.device_mesh["data_parallel"]
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net[1], mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        self.seen.append([p.grad.full_tensor().clone() for p in self.net.parameters()])


class _Automatic(_Shards, Automatic):
    pass


class _Manual(_Shards, Manual):
    pass


def strategy_of(cycle: int, **options: Any) -> GACPModelParallelStrategy:
    return GACPModelParallelStrategy(
        accumulate_grad_batches=cycle, num_items="labels", data_parallel_size=2, tensor_parallel_size=1, **options
    )


def _train(rank: int, cls: Any, kwargs: Any, cycle: int, defer: bool) -> Any:
    cls = _Automatic if cls is Automatic else _Manual
    module = cls(loss=masked_mean, dtype=torch.float64, **kwargs)
    strategy = strategy_of(cycle, defer_gradient_sync=defer)
    trainer = quiet_trainer(strategy=strategy, devices=2, use_distributed_sampler=False)
    scatters = 0
    # named so since torch 2.13
    name = "reduce_scatter_single" if hasattr(torch.distributed, "reduce_scatter_single") else "reduce_scatter_tensor"
    original = getattr(torch.distributed, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal scatters
        scatters += 1
        return original(*args, **kwargs)

    setattr(torch.distributed, name, counting)
    trainer.fit(module, loader(BATCHES[rank]))
    return [[g.numpy() for g in step] for step in module.seen], trainer.global_step, scatters


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("cycle", [1, 3])
@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_cycle_over_ranks_equals_one_big_batch(cls: Any, kwargs: Any, cycle: int, defer: bool) -> None:
    """Micro-batches without items take part in the collectives with exact zeros, though their loss is NaN."""
    gradients, _ = reference_run(BOTH, 2 * cycle, dtype=torch.float64)
    for seen, steps, scatters in on_ranks(_train, cls, kwargs, cycle, defer):
        assert len(seen) == steps == len(gradients)
        for found, expected in zip(seen, gradients, strict=True):
            assert relative_error([torch.from_numpy(g) for g in found], expected) < 1e-12
        # two FSDP units: a reduction each, at every micro-batch or once a cycle
        assert scatters == 2 * (len(gradients) if defer else len(BATCHES[0]))


def _refused(rank: int) -> str:
    trainer = quiet_trainer(strategy=strategy_of(2, average_across_ranks=False), devices=2)
    with pytest.raises(MisconfigurationException) as caught:
        trainer.fit(_Automatic(), loader(BATCHES[rank]))
    return str(caught.value)


def test_means_of_ranks_are_refused() -> None:
    """Each micro-batch is averaged over ranks before the rank's own count is known: no factor can undo it."""
    for message in on_ranks(_refused):
        assert "`average_across_ranks=False` does not work with `GACPModelParallelStrategy`" in message
