"""A picture of memory over one optimizer step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from lightning_utilities.core.imports import RequirementCache
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gacp.callbacks.memory_plot import draw
from lightning_gacp.callbacks.memory_recorder import MemoryRecorder, Sample
from lightning_gacp.callbacks.terminal import size_text

_MATPLOTLIB = RequirementCache("matplotlib>=3.8")
NAME = "gacp_memory"
"""The name of the files, without their suffix."""


class MemoryTimeline(Callback):
    """Draws the memory over one optimizer step as a PNG: forward, backward, recomputation and step of each micro-batch.

    Written on rank 0 into the logger's folder (else the Trainer's ``default_root_dir``): ``gacp_memory.png``, its
    numbers as ``gacp_memory.json``, and on CUDA torch's own snapshot ``gacp_memory.pickle``, to be looked at with
    https://pytorch.org/memory_viz. The recorded step is slow, since every operation is looked at; all others are not.
    On an accelerator the bytes are the allocator's; on a CPU those of all tensors that are alive, counted.

    Args:
        step: The optimizer step to record, from 0. The first one makes the optimizer's states, so 1 shows more.
        compare_with: The ``gacp_memory.json`` of another run, to be drawn into the picture: a before and after.
        dirpath: The folder to write into, instead of the logger's.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: ``step`` is negative.
        FileNotFoundError: ``compare_with`` is not there.
    """

    def __init__(self, step: int = 1, compare_with: str | None = None, dirpath: str | None = None) -> None:
        if not _MATPLOTLIB:
            raise ModuleNotFoundError(
                "`MemoryTimeline` draws with matplotlib, which is not installed: `pip install 'lightning-gacp[plots]'`."
            )
        if step < 0:
            raise ValueError(f"`step={step}` must be 0 or more; write `step=1` for the second optimizer step.")
        self.step = step
        self.dirpath = dirpath
        self.before = None if compare_with is None else read(Path(compare_with))
        self.path: Path | None = None
        """The picture, once it is written."""
        self._recorder: MemoryRecorder | None = None
        self._begun_at = 0
        self._last_step = 0
        self._cycle_begins = True
        self._done = False
        self._cut_short = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start afresh."""
        self._stop()
        self._cycle_begins, self._done, self._cut_short = True, False, False
        self._last_step = trainer.global_step

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the recording, or note the next micro-batch."""
        if self._recorder is not None:
            self._recorder.micro_batch += 1
            self._recorder.phase = "forward"
        elif not self._done and self._cycle_begins and trainer.global_step >= self.step:
            self._begun_at = trainer.global_step
            if pl_module.device.type == "cuda":
                torch.cuda.memory._record_memory_history()
            self._recorder = MemoryRecorder(pl_module.device, _alive(trainer, pl_module))
            self._recorder.__enter__()  # type: ignore[no-untyped-call]

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Note the phase."""
        self._set_phase("backward")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note the phase."""
        self._set_phase("step")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the recording, where the cycle has ended."""
        self._cycle_begins = trainer.global_step > self._last_step
        self._last_step = trainer.global_step
        if self._recorder is not None and trainer.global_step > self._begun_at:
            recorder = self._stop()
            self._done = True
            assert recorder is not None
            self._write(recorder.samples, trainer, pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A validation inside the cycle is left out of the picture."""
        if self._recorder is not None:
            self._stop()
            self._cut_short = True

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so where there is no picture."""
        if self._done:
            return
        if self._cut_short:
            why = "a validation fell into each cycle that was to be recorded. Validate at the end of epochs only"
        else:
            steps = trainer.global_step
            why = f"training ended after {steps} optimizer steps, which count from 0. " + (
                f"Write `step={steps - 1}` or less" if steps else "Train for longer"
            )
        rank_zero_warn(f"`MemoryTimeline(step={self.step})` has drawn nothing: {why}.")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop recording."""
        self._stop()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop recording."""
        self._stop()

    def _set_phase(self, phase: str) -> None:
        if self._recorder is not None:
            self._recorder.phase = phase

    def _stop(self) -> MemoryRecorder | None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return recorder

    def _write(self, samples: list[Sample], trainer: Trainer, pl_module: LightningModule) -> None:
        # On every rank: they agree on the logger's folder.
        folder = Path(self.dirpath or (trainer.log_dir if trainer.loggers else None) or trainer.default_root_dir)
        self._write_files(folder, samples, trainer, pl_module)
        if pl_module.device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)

    @rank_zero_only
    def _write_files(self, folder: Path, samples: list[Sample], trainer: Trainer, pl_module: LightningModule) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{NAME}.png"
        on_cpu = pl_module.device.type == "cpu"
        draw(
            samples,
            self.path,
            title=f"{type(pl_module).__name__}: memory over optimizer step {self._begun_at}",
            measured="live tensors" if on_cpu else f"allocated on {pl_module.device}",
            before=self.before,
        )
        (folder / f"{NAME}.json").write_text(json.dumps([list(sample) for sample in samples]))
        if pl_module.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / f"{NAME}.pickle"))  # type: ignore[no-untyped-call]
        peak = max(samples, key=lambda sample: sample.bytes)
        rank_zero_info(f"MemoryTimeline: peak {size_text(peak.bytes)} in the {peak.phase}; drawn in {self.path}")


def read(path: Path) -> list[Sample]:
    """Read the numbers of a recording."""
    return [Sample(*values) for values in json.loads(path.read_text())]


def _alive(trainer: Trainer, pl_module: LightningModule) -> Iterator[Tensor]:
    """What is allocated between two steps: parameters, buffers, gradients and optimizer states."""
    for parameter in pl_module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from pl_module.buffers()
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
