"""Logs the exact loss of each cycle, its items, throughput, memory and offloaded bytes."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_gacp.accumulation.cycle import CycleResult
from lightning_gacp.callbacks.cycle_loss import CycleLoss
from lightning_gacp.callbacks.device_memory import peak_allocated, peak_resident, reset_peak
from lightning_gacp.callbacks.report import FitReport, finish_report
from lightning_gacp.callbacks.startup_table import print_startup_table
from lightning_gacp.callbacks.stopwatch import BlockTimes
from lightning_gacp.callbacks.treatment import MicroBatchMeter, offloaded_bytes

GIB = 1 << 30


class GACPMonitor(Callback):
    """Logs what each accumulation cycle did, and says at the start and at the end of a fit what was done to the model.

    Every key is logged once a cycle, through ``self.log``, on the axis of optimizer steps:

    ========================= ========== =======================================================================
    key                       unit       meaning
    ========================= ========== =======================================================================
    ``gacp/loss``             the loss's mean loss per item over the cycle, all micro-batches and ranks
    ``gacp/num_items``        items      items of the cycle, all ranks
    ``gacp/items_per_second`` items/s    those, by the time since the last cycle ended (validation left out)
    ``gacp/peak_allocated_gib`` GiB      most memory allocated on this rank's device since the fit began; not on a CPU
    ``gacp/offloaded_gib``    GiB        bytes copied to the host in this cycle on this rank; only with offload
    ========================= ========== =======================================================================

    The device is waited for once a cycle, when the loss is read for the progress bar, and never for a micro-batch.
    Times of recomputation and transfers are taken by events in the streams, and read when the device has passed them.

    Args:
        prog_bar: Show ``gacp/loss`` on the progress bar. If false, nothing waits for the device but the logger.
        table: Print once, after the first forward of a fit, what is done to which blocks, what it saves and costs.
        report: Print a summary at the end of a fit, and write it to ``gacp_report.json`` in the folder of the first
            logger that has one: memory, time in recomputation and in transfers, cycles, lost micro-batches.
    """

    def __init__(self, prog_bar: bool = True, table: bool = True, report: bool = True) -> None:
        self.prog_bar = prog_bar
        self.table = table
        self.report = report
        self.loss = CycleLoss()
        """Loss of the last cycle."""
        self._last: CycleResult | None = None
        self._start = 0.0
        self._paused: float | None = None
        self._offloaded = 0
        self._meter: MicroBatchMeter | None = None
        self._measured = False
        self._report = FitReport()
        self._times: BlockTimes | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start afresh."""
        if not hasattr(trainer.strategy, "cycle_result"):
            raise MisconfigurationException(
                f"`GACPMonitor` reads the cycles of a strategy of this package, and the Trainer has a "
                f"`{type(trainer.strategy).__name__}`. Write `Trainer(strategy='gacp')`, or "
                "`strategy=lightning_gacp.GACPStrategy(...)`."
            )
        self.loss = CycleLoss().to(pl_module.device)
        self._last = trainer.strategy.cycle_result
        self._offloaded = offloaded_bytes(pl_module)
        self._measured = False
        self._paused = None
        self._report = FitReport()
        reset_peak(pl_module.device)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clocks."""
        self._stop_timing()
        if self.report:
            self._times = BlockTimes(pl_module, pl_module.device)
        self._start = time.monotonic()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measure what the first micro-batch of a fit saves."""
        self._report.micro_batches += 1
        if not self._measured and (self.table or self.report):
            self._measured = True
            self._meter = MicroBatchMeter(pl_module)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Say what the first micro-batch has saved, and print the table."""
        self._finish_measuring(trainer)

    def _finish_measuring(self, trainer: Trainer) -> None:
        meter, self._meter = self._meter, None
        if meter is None:
            return
        meter.close()
        memory = meter.result()
        self._report.saved_bytes = memory.saved
        self._report.saved_bytes_without = memory.saved_without
        self._report.recomputed_flops = memory.recomputed_flops
        if self.table:
            counting: str = trainer.strategy.counting  # type: ignore[attr-defined]
            print_startup_table(meter.treatments, meter.cost_of, memory, trainer.accumulate_grad_batches, counting)

    def _stop_measuring(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.close()
        self._stop_timing()

    def _stop_timing(self) -> None:
        times, self._times = self._times, None
        if times is not None:
            times.close()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the cycle, where this micro-batch ended one."""
        self._finish_measuring(trainer)  # for a module that goes round the hooks of the backward
        if self._times is not None:
            self._times.watch.collect()
        result: CycleResult | None = trainer.strategy.cycle_result  # type: ignore[attr-defined]
        if result is None or result is self._last:
            return
        self._last = result
        now = time.monotonic()
        seconds, self._start = now - self._start, now
        self.loss.reset()
        self.loss.update(result.loss, result.num_items)
        loss = self.loss.compute()
        self._report.add(result, seconds)
        if result.total_items > 0:
            # On the host, so that the progress bar, which reads it at every refresh, waits for the device only here.
            loss = loss.cpu() if self.prog_bar else loss
            pl_module.log("gacp/loss", loss, prog_bar=self.prog_bar, batch_size=1)
        self._log(pl_module, "num_items", result.total_items)
        self._log(pl_module, "items_per_second", result.total_items / max(seconds, 1e-9))
        peak = peak_allocated(pl_module.device)
        if peak is not None:
            self._report.peak_allocated_bytes = peak
            self._log(pl_module, "peak_allocated_gib", peak / GIB)
        offloaded = offloaded_bytes(pl_module)
        if offloaded:
            self._log(pl_module, "offloaded_gib", (offloaded - self._offloaded) / GIB)
            self._report.offloaded_bytes += offloaded - self._offloaded
            self._offloaded = offloaded

    def _log(self, pl_module: LightningModule, key: str, value: float) -> None:
        pl_module.log(f"gacp/{key}", torch.tensor(value), batch_size=1)  # a CPU tensor: nothing waits for the device

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock."""
        self._paused = time.monotonic()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the clock go on."""
        if self._paused is not None:
            self._start += time.monotonic() - self._paused
            self._paused = None

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print and write the report."""
        report = self._report
        report.lost_micro_batches = trainer.strategy.lost_micro_batches  # type: ignore[attr-defined]
        report.skipped_cycles = trainer.strategy.skipped_cycles  # type: ignore[attr-defined]
        if pl_module.device.type == "cpu":
            report.peak_resident_bytes = peak_resident()
        if self._times is not None:
            report.take_times(self._times.watch)
        self._stop_timing()
        if self.report:
            finish_report(report, trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing behind."""
        self._stop_measuring()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind."""
        self._stop_measuring()
