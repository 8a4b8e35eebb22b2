"""`GACPMonitor`: what is logged, when, and what is printed and written."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_gacp as gacp
from lightning_gacp.callbacks import monitor, terminal
from lightning_gacp.callbacks.device_memory import peak_allocated, reset_peak
from lightning_gacp.callbacks.monitor import GACPMonitor
from lightning_gacp.callbacks.report import FILE, FitReport, report_rows
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.watching import no_watch
from lightning_gacp.wrapping import layer_of

COUNTS = [5, 2, 7, 1, 3]  # items of the micro-batches: cycles of 2, 2 and a short one


class Model(L.LightningModule):
    """A mean over rows of different numbers; the weights never change, so that losses can be computed afterwards."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        blocks = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3)]
        self.net = nn.Sequential(*blocks, nn.Linear(4, 1))

    def losses(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().squeeze(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.losses(batch).mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batches() -> list[Tensor]:
    return [torch.randn(count, 4) for count in COUNTS]


def fit(module: L.LightningModule, data: list[Tensor], folder: Path, **kwargs: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "strategy": gacp.GACPStrategy(accumulate_grad_batches=2, num_items="samples"),
        "callbacks": [GACPMonitor()],
        "logger": CSVLogger(folder),
        "log_every_n_steps": 1,
        "max_epochs": 1,
    }
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **kwargs},
    )
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return trainer


def rows(trainer: L.Trainer) -> list[dict[str, str]]:
    assert trainer.log_dir is not None
    with open(Path(trainer.log_dir) / "metrics.csv") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_loss_is_the_mean_over_the_items_of_a_cycle(manual: bool, tmp_path: Path) -> None:
    """One value a cycle, at the optimizer steps 0, 1, 2: the mean over all rows of the cycle in one list."""
    module, data = Model(manual), batches()
    trainer = fit(module, data, tmp_path)
    cycles = [torch.cat(data[0:2]), torch.cat(data[2:4]), data[4]]
    found: dict[int, dict[str, str]] = {}
    for row in rows(trainer):
        if row["gacp/loss"]:
            found[int(row["step"])] = row  # in manual optimization Lightning repeats the row within a cycle
    assert sorted(found) == ([0, 1, 2] if not manual else sorted(found))
    last = list(found.values())[-3:]
    for row, cycle in zip(last, cycles, strict=True):
        assert float(row["gacp/loss"]) == pytest.approx(module.losses(cycle).mean().item(), rel=1e-6)
        assert float(row["gacp/num_items"]) == len(cycle)
        assert float(row["gacp/items_per_second"]) > 0


def test_loss_is_on_the_progress_bar(tmp_path: Path) -> None:
    assert "gacp/loss" in fit(Model(), batches(), tmp_path).progress_bar_metrics
    hidden = fit(Model(), batches(), tmp_path, callbacks=[GACPMonitor(prog_bar=False)])
    assert "gacp/loss" not in hidden.progress_bar_metrics
    assert "gacp/loss" in hidden.callback_metrics


def test_keys_without_meaning_here_are_left_out(tmp_path: Path) -> None:
    """On a CPU there is no allocator to ask, and nothing is offloaded: no zeros are made up."""
    keys = {key for key in fit(Model(), batches(), tmp_path).callback_metrics if key.startswith("gacp/")}
    assert keys == {"gacp/loss", "gacp/num_items", "gacp/items_per_second"}


def test_peak_is_logged_where_a_device_counts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In GiB to the logger, in bytes to the report; asked of the allocator, which is replaced here."""
    monkeypatch.setattr(monitor, "peak_allocated", lambda device: 3 << 29)
    trainer = fit(Model(), batches(), tmp_path)
    assert trainer.callback_metrics["gacp/peak_allocated_gib"] == 1.5
    assert read_report(trainer)["peak_allocated_bytes"] == 3 << 29


def test_an_accelerator_without_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """No peak is no error: nothing is logged, nothing is reset."""

    def refuse(device: torch.device) -> int:
        raise RuntimeError("not counted here")

    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", refuse)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", refuse)
    assert peak_allocated(torch.device("mps")) is None
    reset_peak(torch.device("mps"))


def test_a_cycle_without_items_has_no_loss(tmp_path: Path) -> None:
    """Its loss would be 0/0; the next cycle's is right."""

    class Counted(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx < 2 else 1.0)

    def count(batch: Tensor) -> int:
        return 0 if len(batch) in COUNTS[:2] else len(batch)

    module, data = Counted(), batches()
    strategy = gacp.GACPStrategy(accumulate_grad_batches=2, num_items=count)
    with pytest.warns(UserWarning):
        trainer = fit(module, data, tmp_path, strategy=strategy)
    logged = [float(row["gacp/loss"]) for row in rows(trainer) if row["gacp/loss"]]
    assert logged[-1] == pytest.approx(module.losses(data[4]).mean().item(), rel=1e-6)
    assert all(value == value for value in logged)


def test_table_says_what_was_done(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Plain text, where rich is not there: which blocks, and the bytes before and after."""
    monkeypatch.setattr(terminal, "_RICH", False)
    module = Model()
    with checkpoint_blocks(module, every_n_layers=2):
        fit(module, batches(), tmp_path)
    printed = capsys.readouterr().out
    block, inside = 5 * 4 * 4, 5 * 8 * 4  # bytes: the input of a block of five rows, and what lies between its products
    rows = [line.split(maxsplit=5) for line in printed.splitlines() if " x Sequential " in line]
    assert rows == [
        ["net.{0,2}", "2", "x", "Sequential", "recomputed", f"{2 * (block + inside)} B -> {2 * block} B"],
        ["net.1", "1", "x", "Sequential", "kept", f"{block + inside} B"],
    ]
    assert printed.count("first micro-batch: autograd keeps") == 1
    assert "instead of" in printed
    assert "cycle: 2 micro-batches an optimizer step" in printed


def test_saved_bytes_without_are_those_of_the_plain_model(tmp_path: Path) -> None:
    """The report says what the plain model would save, without having run it: equal to a run of it, to the byte."""
    plain, recomputed = Model(), Model()
    plain_report = read_report(fit(plain, batches(), tmp_path))
    with checkpoint_blocks(recomputed):
        report = read_report(fit(recomputed, batches(), tmp_path))
    assert plain_report["saved_bytes"] == plain_report["saved_bytes_without"] == report["saved_bytes_without"]
    assert report["saved_bytes_without"] - report["saved_bytes"] == 3 * 5 * 8 * 4  # what is between the two products
    assert report["recomputed_flops"] == 3 * 2 * 2 * 5 * 4 * 8  # three blocks of two products, 5 rows


def read_report(trainer: L.Trainer) -> dict[str, Any]:
    assert trainer.log_dir is not None
    report: dict[str, Any] = json.loads((Path(trainer.log_dir) / FILE).read_text())
    return report


def test_report_counts_the_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = read_report(fit(Model(), batches(), tmp_path, max_epochs=2))
    assert (report["cycles"], report["optimizer_steps"], report["micro_batches"]) == (6, 6, 10)
    assert (report["items"], report["lost_micro_batches"]) == (2 * sum(COUNTS), 0)
    assert report["peak_allocated_bytes"] is None  # no allocator to ask on a CPU
    assert "6, of 10 micro-batches" in capsys.readouterr().out


def test_without_a_logger_nothing_is_written(tmp_path: Path) -> None:
    fit(Model(), batches(), tmp_path, logger=False, default_root_dir=tmp_path)
    assert not list(Path.cwd().rglob(FILE)) and not list(tmp_path.rglob(FILE))


def test_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With table and report off, nothing is printed and nothing is measured."""
    trainer = fit(Model(), batches(), tmp_path, callbacks=[GACPMonitor(table=False, report=False)])
    assert capsys.readouterr().out == ""
    assert not (Path(str(trainer.log_dir)) / FILE).exists()


def test_nothing_is_left_behind_after_an_exception(tmp_path: Path) -> None:
    """The hooks that measure the first micro-batch are gone, also when its forward fails."""

    class Failing(Model):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.net(batch)
            raise RuntimeError("on purpose")

    module = Failing()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(module, batches(), tmp_path)
    assert not any(part._forward_pre_hooks for part in module.modules())
    kept = torch.ones(3, requires_grad=True)
    saved: Any = kept.exp().grad_fn
    saved._raw_saved_result.register_hooks(lambda tensor: tensor, lambda tensor: tensor)  # refused where hooks are left


def test_the_strategy_must_be_ours(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="strategy='gacp'"):
        fit(BoringModel(), batches(), tmp_path, strategy="auto", callbacks=[GACPMonitor()])


def test_report_says_what_recomputation_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some of the time of the fit where blocks are recomputed, and nothing where none is."""
    assert read_report(fit(Model(), batches(), tmp_path))["recomputation_seconds"] is None
    assert "time in recomputation" not in capsys.readouterr().out
    recomputed = Model()
    with checkpoint_blocks(recomputed):
        report = read_report(fit(recomputed, batches(), tmp_path))
        assert 0 < report["recomputation_seconds"] < report["seconds"]
        assert "time in recomputation" in capsys.readouterr().out
        timers = [layer_of(part, "checkpoint") for part in recomputed.modules()]
        assert {layer.watch for layer in timers if layer is not None} == {no_watch}  # type: ignore[attr-defined]


def test_rows_of_a_report() -> None:
    """All that may have been measured, as it is shown."""
    report = FitReport(
        cycles=8,
        optimizer_steps=7,
        micro_batches=33,
        lost_micro_batches=1,
        skipped_cycles=1,
        items=6400.0,
        seconds=64.0,
        saved_bytes=3 << 20,
        saved_bytes_without=9 << 20,
        recomputation_seconds=16.0,
        offloaded_bytes=5 << 30,
        to_host_seconds=3.0,
        to_device_seconds=2.5,
        stalled_seconds=0.25,
        peak_allocated_bytes=7 << 30,
    )
    assert report_rows(report) == [
        ("cycles", "8, of 33 micro-batches; 1 without an optimizer step"),
        ("lost micro-batches", "1"),
        ("skipped, not finite", "1 cycle"),
        ("items", "6,400, 100 a second"),
        ("saved for the first micro-batch", "3.00 MiB instead of 9.00 MiB"),
        ("time in recomputation", "16.00 s, 25% of the training"),
        ("moved to the host", "5.00 GiB"),
        ("time in transfers", "3.00 s there, 2.50 s back, beside the computation"),
        ("waited for transfers", "0.25 s"),
        ("peak allocated on the device", "7.00 GiB"),
    ]


def test_the_peak_of_the_process_on_a_cpu(tmp_path: Path) -> None:
    """At least what an array takes that was there for a moment, and a plausible size for a process with torch."""
    array = torch.ones(100 << 18)
    del array
    peak = read_report(fit(Model(), batches(), tmp_path))["peak_resident_bytes"]
    assert 100 << 20 < peak < 100 << 30
