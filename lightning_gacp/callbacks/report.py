"""The report at the end of a fit: in the terminal, and as JSON beside the logger's files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_gacp.accumulation.cycle import CycleResult
from lightning_gacp.callbacks.stopwatch import Stopwatch
from lightning_gacp.callbacks.terminal import show, size_text
from lightning_gacp.watching import RECOMPUTATION, STALLED, TO_DEVICE, TO_HOST

FILE = "gacp_report.json"


@dataclass
class FitReport:
    """Figures of one fit, on this rank where nothing else is said. ``None``: not measured.

    Attributes:
        cycles: Finished cycles.
        optimizer_steps: Cycles after which an optimizer stepped.
        micro_batches: Micro-batches that were run.
        lost_micro_batches: Micro-batches that were run and never stepped with.
        skipped_cycles: Cycles that ``skip_non_finite`` has skipped.
        items: Items of all cycles, over all ranks.
        seconds: Time from the start of training to the end of the last cycle, without validation.
        saved_bytes: What autograd kept on the device for the first micro-batch.
        saved_bytes_without: What it would have kept without recomputation and offload.
        recomputed_flops: Operations repeated in the backward of the first micro-batch.
        recomputation_seconds: Time of the recomputed forwards: on an accelerator of its stream, on a CPU of the wall.
        offloaded_bytes: Bytes copied to the host over the fit.
        to_host_seconds: Time of the copies to the host. They run beside the computation.
        to_device_seconds: Time of the copies back, which do too.
        stalled_seconds: Time that the computation has waited for these copies: what they cost.
        peak_allocated_bytes: Most memory allocated on the device at a time, since the fit began; not on a CPU.
        peak_resident_bytes: On a CPU, most memory of the process since it began.
    """

    cycles: int = 0
    optimizer_steps: int = 0
    micro_batches: int = 0
    lost_micro_batches: int = 0
    skipped_cycles: int = 0
    items: float = 0.0
    seconds: float = 0.0
    saved_bytes: int | None = None
    saved_bytes_without: int | None = None
    recomputed_flops: int | None = None
    recomputation_seconds: float | None = None
    offloaded_bytes: int = 0
    to_host_seconds: float | None = None
    to_device_seconds: float | None = None
    stalled_seconds: float | None = None
    peak_allocated_bytes: int | None = None
    peak_resident_bytes: int | None = None

    def add(self, result: CycleResult, seconds: float) -> None:
        """Take a finished cycle in."""
        self.cycles += 1
        self.optimizer_steps += result.stepped
        self.items += result.total_items
        self.seconds += seconds

    def take_times(self, watch: Stopwatch) -> None:
        """Take the times of recomputation and transfers in; waits for the device."""
        watch.collect(wait=True)
        self.recomputation_seconds = watch.seconds(RECOMPUTATION)
        self.to_host_seconds = watch.seconds(TO_HOST)
        self.to_device_seconds = watch.seconds(TO_DEVICE)
        self.stalled_seconds = watch.seconds(STALLED)


def report_rows(report: FitReport) -> list[tuple[str, str]]:
    """Return the rows of the terminal's table; what was not measured has none."""
    steps = f"{report.cycles}, of {report.micro_batches} micro-batches"
    if report.optimizer_steps != report.cycles:
        steps += f"; {report.cycles - report.optimizer_steps} without an optimizer step"
    rows = [("cycles", steps)]
    if report.lost_micro_batches:
        rows.append(("lost micro-batches", str(report.lost_micro_batches)))
    if report.skipped_cycles:
        rows.append(("skipped, not finite", f"{report.skipped_cycles} cycle{'s'[: report.skipped_cycles > 1]}"))
    if report.seconds:
        rows.append(("items", f"{report.items:,.0f}, {report.items / report.seconds:,.0f} a second"))
    if report.saved_bytes is not None and report.saved_bytes_without is not None:
        text = size_text(report.saved_bytes)
        if report.saved_bytes != report.saved_bytes_without:
            text += f" instead of {size_text(report.saved_bytes_without)}"
        rows.append(("saved for the first micro-batch", text))
    if report.recomputation_seconds is not None:
        share = f", {report.recomputation_seconds / report.seconds:.0%} of the training" if report.seconds else ""
        rows.append(("time in recomputation", f"{report.recomputation_seconds:.2f} s{share}"))
    if report.offloaded_bytes:
        rows.append(("moved to the host", size_text(report.offloaded_bytes)))
    if report.to_host_seconds is not None:
        there, back = report.to_host_seconds, report.to_device_seconds or 0.0
        rows.append(("time in transfers", f"{there:.2f} s there, {back:.2f} s back, beside the computation"))
        rows.append(("waited for transfers", f"{report.stalled_seconds or 0.0:.2f} s"))
    if report.peak_allocated_bytes is not None:
        rows.append(("peak allocated on the device", size_text(report.peak_allocated_bytes)))
    if report.peak_resident_bytes is not None:
        rows.append(("peak memory of the process", size_text(report.peak_resident_bytes)))
    return rows


def finish_report(report: FitReport, trainer: Trainer) -> None:
    """Print the report and write it into the folder of the Trainer's logger, where that has one; on rank 0 only.

    Must be called on every rank: they agree on the folder.
    """
    folder = trainer.log_dir if trainer.loggers else None
    _print_and_write(report, None if folder is None else Path(folder) / FILE)


@rank_zero_only
def _print_and_write(report: FitReport, path: Path | None) -> None:
    lines = []
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(report), indent=2) + "\n")
        lines.append(f"written to {path}")
    show("lightning_gacp: end of fit", ("", ""), report_rows(report), lines)
