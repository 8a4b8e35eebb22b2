"""Runs the cells of ``faults.py``, and the reference that knows nothing of Lightning."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint, Timer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors import signal_connector as signals
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch.distributed.fsdp import fully_shard

import lightning_gacp as gacp
from lightning_gacp.strategies import ranks
from tests.strategies.faults import CYCLE, FAULTS, PER_EPOCH, Fault, Outcome
from tests.strategies.models import big_batch_gradients, count, loss_of, make_net, quiet_trainer, ragged_batches
from tests.strategies.models import loader as loader_of
from tests.strategies.on_ranks import on_ranks
from tests.strategies.resuming import StatefulLoader, UnsizedLoader

LENGTHS = [5, 3, 8, 7, 2, 9, 4]
LR, GAMMA = 0.1, 0.8
HINT = "which counts optimizer steps"


class Subject(LightningModule):
    """SGD and a schedule that moves with every step; ``at`` says what goes wrong at which micro-batch."""

    def __init__(self, manual: bool, at: dict[int, str], sharded: bool) -> None:
        super().__init__()
        self.net = make_net(torch.float64)
        self.automatic_optimization = not manual
        self.at, self.sharded, self.fetched = at, sharded, -1

    def configure_model(self) -> None:
        if self.sharded and not getattr(self, "is_sharded", False):
            self.is_sharded = True
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Comes before ``on_train_batch_start``: the batch of the one that is about to begin."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        number = self.trainer.current_epoch * PER_EPOCH + progress
        return {**batch, "labels": batch["labels"] * 0 - 100} if self.at.get(number) == "no items" else batch

    @property
    def here(self) -> str:
        return self.at.get(self.fetched, "")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.fetched = self.trainer.current_epoch * PER_EPOCH + batch_idx
        return -1 if self.here == "minus one" else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.here == "raise":
            raise ArithmeticError
        if self.here == "interrupt":
            raise KeyboardInterrupt
        if self.here == "none":
            return None
        if self.here in ("SIGTERM", "SIGUSR1"):
            os.kill(os.getpid(), getattr(signal, self.here))
        if self.here == "SIGUSR1":
            raise ArithmeticError
        loss = loss_of(self.net, batch)
        if self.here in ("nan", "inf") and self.trainer.global_rank == self.trainer.world_size - 1:
            if self.here == "inf":
                loss.register_hook(lambda gradient: gradient * float("inf"))
            else:
                loss = loss * float("nan")
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        for _ in range({"no step": 0, "two steps": 2}.get(self.here, 1)):
            optimizer.step()
        self.lr_schedulers().step()
        return None

    def on_after_backward(self) -> None:
        if self.here == "raise in backward":
            raise ArithmeticError
        if self.here == "SIGUSR1 in backward":
            os.kill(os.getpid(), signal.SIGUSR1)
            raise ArithmeticError

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss_of(self.net, batch)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.here == "should_stop":
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=LR)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class OutOfTime(Timer):
    """Its time is over after the fifth micro-batch."""

    def __init__(self) -> None:
        super().__init__({"seconds": 60})
        self.seen = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen += 1
        super().on_train_batch_end(*args, **kwargs)

    def time_elapsed(self, stage: Any = None) -> float:
        return 0.0 if self.seen < 5 else 61.0


class SavesByTime(ModelCheckpoint):
    """Its hour is over after the fifth micro-batch."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, train_time_interval=timedelta(hours=1))
        self.seen = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen += 1
        if self.seen == 5:
            self._last_time_checked = time.monotonic() - 3600
        super().on_train_batch_end(*args, **kwargs)


@dataclass
class Observed:
    """What came of a cell on one rank, as plain values."""

    weights: list[np.ndarray]
    said: list[str]
    lost: int
    skipped: int
    moves: int
    global_step: int
    error: str
    left: list[str]  # that was not there before: open files, threads, processes, shared memory, temporary files


def batches_of(fault: Fault, rank: int) -> list[Any]:
    return ragged_batches(LENGTHS[rank:] + LENGTHS[:rank], seed=rank)[: fault.sizes[rank]]


def strategy_of(fault: Fault, kind: str) -> Any:
    options = {"accumulate_grad_batches": CYCLE, "num_items": "labels", **fault.strategy}
    if kind == "one":
        return gacp.GACPStrategy(**options)
    if kind == "ddp":
        return gacp.GACPDDPStrategy(**options)
    return gacp.GACPModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **options)


def run(fault: Fault, manual: bool, kind: str, rank: int, folder: Path) -> Observed:
    """Runs one cell, on this rank."""
    before, temporary = _held(kind), folder / f"tmp{rank}"
    temporary.mkdir()
    tempfile.tempdir = str(temporary)
    with warnings.catch_warnings(record=True) as caught, handlers_and_variables(rank, kind):
        warnings.simplefilter("always")
        module, trainer, error = _run(fault, manual, kind, rank, folder)
    tempfile.tempdir = None
    if left := _held(kind) - before:
        gc.collect()  # a Trainer and its parts refer to each other
        left = _held(kind) - before
    return Observed(
        [getattr(p, "full_tensor", lambda p=p: p)().detach().numpy().copy() for p in module.net.parameters()],
        [text for text in map(str, (warning.message for warning in caught)) if "micro-batch" in text or HINT in text],
        trainer.strategy.lost_micro_batches,
        trainer.strategy.skipped_cycles,
        trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        trainer.global_step,
        error,
        [*left, *(path.name for path in temporary.iterdir())],
    )


def _held(kind: str) -> Counter[str]:
    """What this process holds of the system's, but for the groups of device meshes: a fit of Lightning's leaves one."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    if kind == "fsdp2":
        files = [name for name in files if not name.startswith(("socket:", "pipe:", "anon_inode:[eventpoll]"))]
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line.split()[-1] for line in maps if "/dev/shm/" in line]
    named = [str(path) for path in Path("/dev/shm").glob(f"*_{os.getpid()}_*")]
    threads = [thread.name for thread in threading.enumerate()]
    children = [child for task in Path("/proc/self/task").iterdir() for child in _words(task / "children")]
    return Counter([*files, *shared, *named, *threads, *(f"process {child}" for child in children)])


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _trainer(fault: Fault, kind: str, folder: Path) -> Any:
    made: dict[str, Any] = {
        "timer": OutOfTime,
        "by time": lambda: SavesByTime(folder),
        "after validation": lambda: ModelCheckpoint(folder, save_on_train_epoch_end=False),
        "on exception": lambda: OnExceptionCheckpoint(folder),
    }
    plugins: list[Any] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))] if fault.scaled else []
    if "slurm" in fault.callbacks:
        plugins.append(SLURMEnvironment())
    callbacks = [made[name]() for name in fault.callbacks if name in made]
    return quiet_trainer(
        strategy=strategy_of(fault, kind),
        callbacks=callbacks,
        plugins=plugins,
        devices=1 if kind == "one" else 2,
        default_root_dir=folder,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        **{"max_epochs": 2, "use_distributed_sampler": False, **fault.trainer},
    )


def _run(fault: Fault, manual: bool, kind: str, rank: int, folder: Path) -> tuple[Subject, Any, str]:
    def fit(trainer: Any, module: Subject, path: Any = None) -> str:
        loader = (UnsizedLoader if fault.unsized else StatefulLoader)(batches_of(fault, rank))
        validation = loader_of(batches_of(fault, rank)[:1]) if "after validation" in fault.callbacks else None
        try:
            trainer.fit(module, loader, validation, ckpt_path=path, weights_only=path and True)
        except (ArithmeticError, SystemExit, SIGTERMException, RuntimeError, MisconfigurationException) as found:
            return type(found).__name__
        return ""

    module = Subject(manual, fault.at, kind == "fsdp2")
    trainer = _trainer(fault, kind, folder)
    error = fit(trainer, module)
    if fault.then:
        module.at = {}
    if fault.then == "fit again":
        assert not fit(trainer, module)
    elif fault.then == "resume" and (path := _saved(trainer, folder)) is not None:
        module = Subject(manual, {}, kind == "fsdp2")
        trainer = _trainer(fault, kind, folder)
        assert not fit(trainer, module, path)
    return module, trainer, error


def _saved(trainer: Any, folder: Path) -> Path | None:
    if isinstance(trainer.checkpoint_callback, ModelCheckpoint):
        return Path(path) if (path := trainer.checkpoint_callback.best_model_path) else None
    return next(folder.glob("*.ckpt"))


@contextmanager
def handlers_and_variables(rank: int, kind: str) -> Iterator[None]:
    """Lets SLURM's variables in, keeps its commands off, and puts the signals' handlers back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers, environment, command = [signal.getsignal(number) for number in numbers], dict(os.environ), signals.call
    size = "1" if kind == "one" else "2"
    os.environ.update(SLURM_NTASKS=size, SLURM_NTASKS_PER_NODE=size, SLURM_PROCID=str(rank))
    os.environ.update(SLURM_JOB_ID="1", SLURM_LOCALID=str(rank), SLURM_NODEID="0")
    os.environ.update(SLURM_JOB_NAME="interactive")  # so that no Trainer takes it for its environment unasked
    signals.call = lambda *_: 0  # `scontrol requeue`
    try:
        yield
    finally:
        signals.call = command
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def _all(rank: int, kind: str, root: str) -> dict[Any, Observed]:
    """Every cell of a strategy, in one process group."""
    ranks._default_group_serves = lambda: kind != "ddp"  # as under NCCL: each fit has a group of its own for counts
    found: dict[Any, Observed] = {}
    first = next(iter(FAULTS))
    for number, name in enumerate([first, *FAULTS]):  # the first once more: it opens the process group
        for manual in (False, True):
            folder = Path(root, f"{number}{manual}")
            folder.mkdir(exist_ok=True)
            if isinstance(FAULTS[name].outcome(manual, kind), Outcome):
                found[name, manual] = run(FAULTS[name], manual, kind, rank, folder)
    return found


@lru_cache
def observed(kind: str) -> list[dict[Any, Observed]]:
    """All cells of a strategy, by rank."""
    with tempfile.TemporaryDirectory() as root:
        return [_all(0, kind, root)] if kind == "one" else on_ranks(_all, kind, root)


def expected_weights(fault: Fault, outcome: Outcome, kind: str) -> list[np.ndarray]:
    """SGD over big batches: the cycles' micro-batches of all ranks together."""
    streams = [batches_of(fault, rank) for rank in range(1 if kind == "one" else 2)]
    net = make_net(torch.float64)
    rate = LR
    for number, cycle in enumerate(outcome.cycles):
        if number == outcome.fresh_from:
            rate = LR
        group = [stream[i % PER_EPOCH] for i in cycle for stream in streams]
        assert count(group)
        for parameter, gradient in zip(net.parameters(), big_batch_gradients(net, group), strict=True):
            parameter.data -= rate * gradient
        rate *= GAMMA
    return [parameter.detach().numpy() for parameter in net.parameters()]
