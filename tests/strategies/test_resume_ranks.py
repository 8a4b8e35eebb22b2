"""Several ranks: a run that is cut inside a cycle goes on, on as many ranks or on another number of them."""

from __future__ import annotations

import os
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import lightning_gacp as gacp
from tests.strategies.models import ragged_batches
from tests.strategies.on_ranks import on_ranks
from tests.strategies.resuming import CYCLE, Learner, SaveAndCut, StatefulLoader, ToldLearner, TwoPlayers, train

LENGTHS = [5, 3, 0, 7, 2, 9, 4, 6, 1, 8, 3, 5, 2, 2, 6, 4]
UNITS = 2  # batches of the stream that the ranks share out per micro-batch, whatever their number


class Shared(StatefulLoader):
    """Shares a stream of batches out: with 2 ranks each has every second one, a single rank has them in pairs."""

    def __init__(self, rank: int, ranks: int) -> None:
        stream = ragged_batches(LENGTHS)
        groups = [stream[i : i + UNITS] for i in range(0, len(stream), UNITS)]
        super().__init__([_joined(group[rank::ranks]) for group in groups])


def _joined(group: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    if len(group) == 1:
        return group[0]
    width = max(batch["labels"].shape[1] for batch in group)
    pads = {"inputs": 0, "labels": -100}
    return {
        key: torch.cat([torch.nn.functional.pad(b[key], (0, width - b[key].shape[1]), value=pads[key]) for b in group])
        for key in pads
    }


def using(kind: str, **options: Any) -> Any:
    make = {"ddp": gacp.GACPDDPStrategy, "fsdp2": gacp.GACPModelParallelStrategy, "fsdp": gacp.GACPFSDPStrategy}
    if kind == "one":
        return gacp.GACPStrategy(accumulate_grad_batches=CYCLE, num_items="labels", **options)
    return make[kind](accumulate_grad_batches=CYCLE, num_items="labels", **options)


def sharded(module: Any) -> Any:
    class Sharded(type(module)):  # type: ignore[misc]
        def configure_model(self) -> None:
            for net in [child for name, child in self.named_children() if name in ("net", "other")]:
                fully_shard(net[1], mesh=self.device_mesh["data_parallel"])
                fully_shard(net, mesh=self.device_mesh["data_parallel"])

    module.__class__ = Sharded
    return module


def run(
    rank: int,
    ranks: int,
    kind: str,
    make: Any,
    manual: bool,
    saving: tuple[int, str] | None = None,
    path: str | None = None,
    options: dict[str, Any] | None = None,
) -> tuple[list[Any], int, list[str]]:
    module = make(manual)
    if kind == "fsdp2":
        module = sharded(module)
    sizes = {"data_parallel_size": ranks, "tensor_parallel_size": 1} if kind == "fsdp2" else {}
    callbacks = [SaveAndCut(saving[0], Path(saving[1]))] if saving else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = train(
            module,
            Shared(rank, ranks),
            *callbacks,
            path=Path(path) if path else None,
            using=lambda: using(kind, **sizes, **(options or {})),
            max_epochs=1,
            devices=ranks,
            use_distributed_sampler=False,
        )
    said = [
        str(warning.message) for warning in caught if "lost" in str(warning.message) or "cycle" in str(warning.message)
    ]
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach().numpy().copy() for p in module.parameters()]
    return weights, trainer.strategy.lost_micro_batches, said


def train_all(rank: int, kind: str, make: Any, manual: bool, folder: str, at: list[int], options: Any = None) -> Any:
    """The whole run, then each cut and its resumption, in one process group."""
    found = [run(rank, 2, kind, make, manual, options=options)]
    for index in at:
        path = f"{folder}/{index}.ckpt"
        run(rank, 2, kind, make, manual, saving=(index, path), options=options)
        found.append(run(rank, 2, kind, make, manual, path=path, options=options))
    return found


def assert_equal_weights(found: list[Any], expected: list[Any], tolerance: float = 1e-6) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "make", "manual", "options"),
    [
        pytest.param("ddp", Learner, False, {}, id="ddp"),
        pytest.param("ddp", Learner, True, {}, id="ddp by hand"),
        pytest.param("ddp", TwoPlayers, True, {"find_unused_parameters": True}, id="ddp, two optimizers"),
        pytest.param("ddp", ToldLearner, False, {}, id="ddp, look-ahead"),
        pytest.param("ddp", Learner, False, {"static_graph": True}, id="ddp, static graph"),
        pytest.param("ddp", Learner, False, {"gradient_as_bucket_view": True}, id="ddp, bucket views"),
        pytest.param("fsdp2", Learner, False, {}, id="fsdp2"),
        pytest.param("fsdp2", Learner, True, {}, id="fsdp2 by hand"),
        pytest.param("fsdp2", Learner, False, {"save_distributed_checkpoint": False}, id="fsdp2, one file"),
    ],
)
def test_two_ranks(kind, make, manual, options, tmp_path):
    at = [1, 2, 3, 4, 5, 6, 7] if kind == "ddp" and not options else [2, 3, 5]
    for found in on_ranks(train_all, kind, make, manual, str(tmp_path), at, options):
        (whole, *_), *resumed = found
        for weights, lost, said in resumed:
            assert_equal_weights(weights, whole)
            assert lost == 0 and said == []


def _cut(rank: int, ranks: int, kind: str, path: str, make: Any = Learner, options: Any = None) -> Any:
    return run(rank, ranks, kind, make, False, saving=(6, path), options=options)


def _resume(rank: int, ranks: int, kind: str, path: str, make: Any = Learner, options: Any = None) -> Any:
    return run(rank, ranks, kind, make, False, path=path, options=options)


def _alone(kind: str, path: str | None, saving: Any = None, make: Any = Learner) -> Any:
    return run(0, 1, kind, make, False, saving=saving, path=path)


@pytest.mark.parametrize(
    ("before", "after"), [("ddp", "one"), ("one", "ddp"), ("ddp 2", "ddp 1"), ("fsdp2 2", "fsdp2 1")]
)
def test_another_number_of_ranks(before, after, tmp_path):
    """Cut after 2 of 4 micro-batches of the second cycle; the stream is shared out anew."""
    path = str(tmp_path / "c.ckpt")
    whole = _alone("one", None)[0]
    kind = before.split()[0]
    if kind == "one":
        _alone(kind, None, saving=(6, path))
    else:
        on_ranks(_cut, 2, kind, path)
    if after == "ddp":
        resumed = on_ranks(_resume, 2, "ddp", path)
    elif after == "one":
        resumed = [_alone("one", path)]
    else:
        resumed = on_ranks(_resume, 1, kind, path, ranks=1)
    for weights, lost, said in resumed:
        assert_equal_weights(weights, whole, 2e-6)
        assert lost == 0 and said == []


def test_losses_divided_by_another_cycles_items_are_lost(tmp_path):
    path = str(tmp_path / "c.ckpt")
    on_ranks(_cut, 2, "ddp", path, ToldLearner)
    _, lost, said = _alone("one", path, make=ToldLearner)
    assert lost == 2
    assert said == [
        "2 micro-batches were lost: the checkpoint is of 2 ranks, and these are 1: its losses were divided by the items"
        " of a cycle that is now another one. Their gradients are discarded; no step was taken with them."
    ]


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (
            "ddp",
            {"average_across_ranks": False},
            "with `average_across_ranks=False` every rank has gradients of its own, and one file holds one set",
        ),
        ("fsdp2", {"defer_gradient_sync": True}, "with `defer_gradient_sync=True` its gradients are out of reach"),
    ],
)
def test_what_cannot_be_carried_is_said(kind, options, why, tmp_path):
    """When the checkpoint is written, with the boundary it stands for, and when it is resumed; each once."""
    path = str(tmp_path / "c.ckpt")
    discarded = "Their gradients are discarded; no step was taken with them."
    (_, lost, said), *others = on_ranks(_cut, 2, kind, path, Learner, options)
    assert lost == 2
    assert said == [
        f"A checkpoint was written inside a cycle, and holds the weights of its beginning: {why}. A run resumed from it"
        " will be without these 2 micro-batches.",
        f"2 micro-batches were lost: `Cut` interrupted the cycle. {discarded}",
    ]
    assert others[0][1:] == (2, [])
    (_, lost, said), *others = on_ranks(_resume, 2, kind, path, Learner, options)
    assert lost == 2
    assert said == [f"2 micro-batches were lost: {why}. {discarded}"]
    assert others[0][1:] == (2, [])


def _with_plain(rank: int, kind: str, folder: str, sharded_file: bool) -> Any:
    """Ours inside a cycle, resumed by Lightning alone; Lightning's inside and at the end of one, resumed by ours."""
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    if kind == "ddp":
        plain: Any = DDPStrategy
        ours: Any = partial(using, "ddp")
    else:
        options = {**sizes, "save_distributed_checkpoint": sharded_file}
        plain = partial(ModelParallelStrategy, **options)
        ours = partial(using, "fsdp2", **options)

    def go(strategy: Any, path: str = "", at: int = 0, save: str = "", **trainer: Any) -> Any:
        module = Learner() if kind == "ddp" else sharded(Learner())
        callbacks = [SaveAndCut(at, Path(save))] if save else []
        settings = {"max_epochs": 1, "devices": 2, "use_distributed_sampler": False, **trainer}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = train(
                module, Shared(rank, 2), *callbacks, path=Path(path) if path else None, using=strategy, **settings
            )
        return run.global_step, [str(w.message) for w in caught if "lost" in str(w.message)]

    lightning = {"accumulate_grad_batches": CYCLE}
    go(ours, at=6, save=f"{folder}/ours.ckpt")
    found = [go(plain, f"{folder}/ours.ckpt", **lightning)]
    for at in (6, 4):
        go(plain, at=at, save=f"{folder}/plain{at}.ckpt", **lightning)
        found.append(go(ours, f"{folder}/plain{at}.ckpt"))
    return found


@pytest.mark.parametrize(("kind", "in_shards"), [("ddp", False), ("fsdp2", True), ("fsdp2", False)])
def test_with_lightnings_own_strategies(kind, in_shards, tmp_path):
    """Each loads what the other has saved; what is missing in an open cycle of Lightning's is said."""
    without = (
        "2 micro-batches were lost: the checkpoint was written inside a cycle, without this package. Their gradients"
        " are discarded; no step was taken with them."
    )
    steps = 2  # cycles of 4 of 8 micro-batches
    ranks = on_ranks(_with_plain, kind, str(tmp_path), in_shards)
    assert ranks[0] == [(steps, []), (steps, [without]), (steps, [])]
    assert ranks[1] == [(steps, [])] * 3


def _cut_at(rank: int, path: str, at: list[int]) -> list[list[str]]:
    """Saves at each of these micro-batches to the same path; what is then in its folder of gradients."""
    folders = []
    for index in at:
        run(rank, 2, "fsdp2", Learner, False, saving=(index, path))
        torch.distributed.barrier()
        folder = Path(path) / "lightning_gacp"
        folders.append(sorted(each.name for each in folder.iterdir()) if folder.exists() else [])
        torch.distributed.barrier()
    return folders


def test_shards_of_gradients_are_their_checkpoints_alone(tmp_path):
    """One that replaces another leaves no gradients of the other's; without its own, the cycle is said to be lost."""
    path = str(tmp_path / "c.ckpt")
    assert on_ranks(_cut_at, path, [5, 8, 6])[0] == [["4"], [], ["5"]]
    shutil.rmtree(tmp_path / "c.ckpt" / "lightning_gacp")
    (_, lost, said), _ = on_ranks(_resume, 2, "fsdp2", path)
    assert lost == 2
    assert said == [
        "2 micro-batches were lost: the checkpoint was written in shards, and those of the gradients are not here."
        " Their gradients are discarded; no step was taken with them."
    ]


def test_an_exception_on_one_rank_does_not_wait_for_the_others(tmp_path):
    """Its checkpoint says that the cycle is lost instead of averaging gradients with ranks that never come."""

    found = on_ranks(_fails_on_rank_1, str(tmp_path), timeout=60)
    assert found == [3, 3]


def _fails_on_rank_1(rank: int, folder: str) -> Any:
    class SavesNothingElse(Callback):
        def on_exception(self, trainer, *args):
            trainer.strategy.save_checkpoint({"optimizer_states": []}, os.path.join(folder, f"{rank}.ckpt"))
            found.append(trainer.strategy._cycle_state()["lost"])  # rank 0 alone writes a file

    class Fails(Learner):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 2:
                raise ArithmeticError

    found: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            train(Fails(), Shared(rank, 2), SavesNothingElse(), using=lambda: using("ddp"), devices=2)
        except ArithmeticError:
            return found[0]
    return None
