"""The report at the end of a fit: in the terminal, and as JSON beside the logger's files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_gacp.accumulation.cycle import CycleResult
from lightning_gacp.callbacks.terminal import show, size_text

FILE = "gacp_report.json"


@dataclass
class FitReport:
    """Figures of one fit, on this rank where nothing else is said. ``None``: not measured.

    Attributes:
        cycles: Finished cycles.
        optimizer_steps: Cycles after which an optimizer stepped.
        micro_batches: Micro-batches that were run.
        lost_micro_batches: Micro-batches that were run and never stepped with.
        items: Items of all cycles, over all ranks.
        seconds: Time from the start of training to the end of the last cycle, without validation.
        saved_bytes: What autograd kept on the device for the first micro-batch.
        saved_bytes_without: What it would have kept without recomputation and offload.
        recomputed_flops: Operations repeated in the backward of the first micro-batch.
        offloaded_bytes: Bytes copied to the host over the fit.
        peak_allocated_bytes: Most memory allocated on the device at a time.
    """

    cycles: int = 0
    optimizer_steps: int = 0
    micro_batches: int = 0
    lost_micro_batches: int = 0
    items: float = 0.0
    seconds: float = 0.0
    saved_bytes: int | None = None
    saved_bytes_without: int | None = None
    recomputed_flops: int | None = None
    offloaded_bytes: int = 0
    peak_allocated_bytes: int | None = None

    def add(self, result: CycleResult, seconds: float) -> None:
        """Take a finished cycle in."""
        self.cycles += 1
        self.optimizer_steps += result.stepped
        self.items += result.total_items
        self.seconds += seconds


def report_rows(report: FitReport) -> list[tuple[str, str]]:
    """Return the rows of the terminal's table; what was not measured has none."""
    steps = f"{report.cycles}, of {report.micro_batches} micro-batches"
    if report.optimizer_steps != report.cycles:
        steps += f"; {report.cycles - report.optimizer_steps} without an optimizer step"
    rows = [("cycles", steps)]
    if report.lost_micro_batches:
        rows.append(("lost micro-batches", str(report.lost_micro_batches)))
    if report.seconds:
        rows.append(("items", f"{report.items:,.0f}, {report.items / report.seconds:,.0f} a second"))
    if report.saved_bytes is not None and report.saved_bytes_without is not None:
        text = size_text(report.saved_bytes)
        if report.saved_bytes != report.saved_bytes_without:
            text += f" instead of {size_text(report.saved_bytes_without)}"
        rows.append(("saved for the first micro-batch", text))
    if report.offloaded_bytes:
        rows.append(("moved to the host", size_text(report.offloaded_bytes)))
    if report.peak_allocated_bytes is not None:
        rows.append(("peak allocated on the device", size_text(report.peak_allocated_bytes)))
    return rows


def print_report(report: FitReport) -> None:
    """Print the report; on rank 0 only."""
    show("lightning_gacp: end of fit", ("", ""), report_rows(report))


@rank_zero_only
def _write(report: FitReport, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(asdict(report), indent=2) + "\n")


def write_report(report: FitReport, trainer: Trainer) -> None:
    """Write the report into the folder of the Trainer's logger; without a logger that has one, do nothing.

    Must be called on every rank: they agree on the folder.
    """
    if trainer.loggers:
        folder = trainer.log_dir
        if folder is not None:
            _write(report, Path(folder))
