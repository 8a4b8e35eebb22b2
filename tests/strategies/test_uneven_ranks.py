"""Train loaders of different lengths on the ranks: an epoch ends on all of them together, and what is left is said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import lightning_gacp as gacp
from tests.strategies.models import Automatic, Manual, loss_of, quiet_trainer, ragged_batches, reference_run
from tests.strategies.on_ranks import on_ranks
from tests.strategies.resuming import SaveAndCut, StatefulLoader, Stream, UnsizedLoader

CYCLE = 3
LENGTHS = [5, 3, 0, 7, 2, 9, 4, 6]


def stream(rank: int, size: int) -> list[Any]:
    return ragged_batches(LENGTHS[rank:] + LENGTHS[:rank], seed=rank)[:size]


class _Told(LightningModule):
    """Divides by the items of the cycle itself: a cycle is read ahead."""

    def training_step(self: Any, batch: Any, batch_idx: int, num_items_in_batch: float) -> Any:
        loss = loss_of(self.net, batch, "sum") / num_items_in_batch
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


class ToldAutomatic(_Told, Automatic):
    pass


class ToldManual(_Told, Manual):
    pass


def made(cls: type[Automatic], kind: str) -> Any:
    """A module in float64, sharded for ``fsdp2``, that counts its validations and records no gradients."""

    class Made(cls):  # type: ignore[misc,valid-type]
        validations = 0

        def configure_model(self) -> None:
            if kind == "fsdp2":
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            pass

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", loss_of(self.net, batch), sync_dist=True)
            self.validations += 1

    return Made(dtype=torch.float64)


def fit(rank: int, ranks: int, kind: str, cls: Any, data: Any, *callbacks: Any, **trainer: Any) -> Any:
    """Trains on ``data``, validating at the end of each epoch; what came out, as plain values."""
    if kind == "ddp":
        strategy: Any = gacp.GACPDDPStrategy(accumulate_grad_batches=CYCLE, num_items="labels")
    else:
        strategy = gacp.GACPModelParallelStrategy(
            accumulate_grad_batches=CYCLE, num_items="labels", data_parallel_size=ranks, tensor_parallel_size=1
        )
    path = trainer.pop("ckpt_path", None)
    module = made(cls, kind)
    options = {"devices": ranks, "use_distributed_sampler": False, "num_sanity_val_steps": 0, **trainer}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = quiet_trainer(strategy=strategy, callbacks=list(callbacks), **options)
        try:
            run.fit(module, data, DataLoader(stream(rank, 2), batch_size=None), ckpt_path=path, weights_only=None)  # type: ignore[arg-type]
        except Exception as error:
            if type(error).__name__ != "Cut":
                raise
    said = [str(warning.message) for warning in caught if "micro-batch" in str(warning.message)]
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach().numpy().copy() for p in module.net.parameters()]
    return weights, run.global_step, run.current_epoch, module.validations, said, strategy.lost_micro_batches


def all_cases(rank: int, ranks: int, kind: str, sizes: list[int], modules: list[Any]) -> list[Any]:
    found = []
    for cls in modules:
        loader: Any = DataLoader(Stream(stream(rank, sizes[rank])), batch_size=None)
        found.append(fit(rank, ranks, kind, cls, loader, max_epochs=2))
    return found


def check(found: Any, sizes: list[int], epochs: int = 2) -> None:
    """The weights are those of big batches over the micro-batches that all ranks had."""
    ranks, least = len(sizes), min(sizes)
    together = [batch for each in zip(*(stream(rank, least) for rank in range(ranks)), strict=True) for batch in each]
    gradients, net = reference_run(together, CYCLE * ranks, epochs, dtype=torch.float64)
    weights, steps, current_epoch, validations, _, lost = found
    for a, b in zip(weights, net.parameters(), strict=True):
        torch.testing.assert_close(torch.from_numpy(a), b.detach(), rtol=1e-10, atol=1e-12)
    assert steps == len(gradients) and current_epoch == epochs and lost == 0
    assert validations == 2 * epochs if least else validations == 0


ONE_LEFT = (
    "The train loaders of {ended} of {ranks} ranks ended after {least} micro-batches, and the epoch ends on all ranks"
    " together: {left} left, and whatever follows. Loaders of the same length on all ranks leave nothing."
)


@pytest.mark.parametrize(
    ("kind", "sizes", "ended", "left"),
    [
        ("ddp", [7, 5], 1, "1 micro-batch that another rank had fetched is"),
        ("ddp", [4, 8, 6], 1, "2 micro-batches that other ranks had fetched are"),
        ("ddp", [6, 3], 1, "1 micro-batch that another rank had fetched is"),
        ("ddp", [4, 0], 1, "1 micro-batch that another rank had fetched is"),
        ("fsdp2", [5, 7], 1, "1 micro-batch that another rank had fetched is"),
        ("fsdp2", [5, 5, 8], 2, "1 micro-batch that another rank had fetched is"),
        ("fsdp2", [0, 2], 1, "1 micro-batch that another rank had fetched is"),
    ],
)
def test_unsized(kind, sizes, ended, left):
    """Two epochs each: automatic and manual, alone and reading ahead; a validation at the end of each epoch."""
    ranks = len(sizes)
    modules = [Automatic, Manual, ToldAutomatic, ToldManual]
    message = ONE_LEFT.format(ended=ended, ranks=ranks, least=min(sizes), left=left)
    for rank, each in enumerate(on_ranks(all_cases, ranks, kind, sizes, modules, ranks=ranks, timeout=60)):
        for found in each:
            check(found, sizes)
            assert found[4] == ([message] * 2 if rank == 0 else [])


def _several(rank: int, ranks: int, kind: str, folder: str) -> Any:
    """In one process group: sized loaders, with a limit or without, one of each sort, and a run that is resumed."""

    def sized(sizes: list[int], **trainer: Any) -> Any:
        return fit(rank, ranks, kind, Automatic, StatefulLoader(stream(rank, sizes[rank])), max_epochs=2, **trainer)

    one_of_each = (UnsizedLoader if rank == 0 else StatefulLoader)(stream(rank, [7, 5][rank]))
    path = f"{folder}/c.ckpt"
    fit(rank, ranks, kind, Manual, UnsizedLoader(stream(rank, [7, 5][rank])), SaveAndCut(4, path))  # type: ignore[arg-type]
    return {
        "sized": sized([7, 5]),
        "within the limit": sized([7, 5], limit_train_batches=4),
        "above the limit": sized([7, 5], limit_train_batches=6),
        "one of each": fit(rank, ranks, kind, ToldAutomatic, one_of_each, max_epochs=2),
        "resumed": fit(
            rank, ranks, kind, Manual, UnsizedLoader(stream(rank, [7, 5][rank])), max_epochs=2, ckpt_path=path
        ),
    }


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_sized_mixed_and_resumed(kind, tmp_path):
    ranks = on_ranks(_several, 2, kind, str(tmp_path), timeout=60)
    sized = (
        "The train loaders of the 2 ranks have 7, 5 micro-batches, and an epoch ends on all ranks together, after 5: {}"
        " left. Loaders of the same length on all ranks leave nothing."
    )
    fetched = ONE_LEFT.format(ended=1, ranks=2, least=5, left="1 micro-batch that another rank had fetched is")
    for rank, found in enumerate(ranks):
        for name, least in (("sized", 5), ("within the limit", 4), ("above the limit", 5), ("one of each", 5)):
            check(found[name], [least, least])
        check(found["resumed"], [5, 5])
        said = {name: each[4] for name, each in found.items()}
        assert said["within the limit"] == []
        assert said["sized"] == ([sized.format("2 are")] if rank == 0 else [])
        assert said["above the limit"] == ([sized.format("1 is")] if rank == 0 else [])
        assert said["one of each"] == ([fetched] * 2 if rank == 0 else [])
        assert said["resumed"] == ([fetched] * 2 if rank == 0 else [])
