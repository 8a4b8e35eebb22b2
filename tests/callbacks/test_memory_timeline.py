"""`MemoryTimeline` and its recorder: exact bytes, phases in order, files, and nothing left behind."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_gacp as gacp
from lightning_gacp.callbacks import memory_timeline
from lightning_gacp.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_gacp.callbacks.memory_plot import borders, times_of
from lightning_gacp.callbacks.memory_recorder import MemoryRecorder, Sample
from lightning_gacp.callbacks.memory_timeline import MemoryTimeline, read

CPU = torch.device("cpu")


def test_every_storage_counts_once_and_until_it_is_freed() -> None:
    """A view is no storage of its own; a result that replaces another leaves one of the two."""
    given = torch.randn(1000)
    with MemoryRecorder(CPU, [given, given[:10]]) as recorder:
        first = given + 1
        second = first.exp()
        del first
        view = second.view(10, 100)
        del second
        _ = view.sum(dim=0)  # a hundred floats; the view keeps its storage alive
        del view
        given.mul_(2)
    assert [sample.bytes for sample in recorder.samples] == [4000, 8000, 12000, 8000, 8400, 4400]


def test_recomputation_is_told_from_backward() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    with MemoryRecorder(CPU) as recorder:
        loss = checkpoint(layer, torch.randn(2, 4, requires_grad=True), use_reentrant=False).sum()
        recorder.phase = "backward"
        loss.backward()
    phases = [phase for phase, _ in groupby(sample.phase for sample in recorder.samples)]
    assert phases == ["forward", "backward", "recompute", "backward"]


class Model(L.LightningModule):
    """Two blocks and a step."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(2)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        if self.fails and batch_idx == 3:
            raise RuntimeError("on purpose")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def fit(module: L.LightningModule, *callbacks: L.Callback, **kwargs: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "strategy": gacp.GACPStrategy(accumulate_grad_batches=2, num_items="samples"),
        "logger": False,
    }
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **kwargs},
    )
    trainer.fit(module, DataLoader([torch.randn(16, 8) for _ in range(8)], batch_size=None))  # type: ignore[arg-type]
    return trainer


def runs(samples: list[Sample]) -> list[tuple[int, str]]:
    return [key for key, _ in groupby((sample.micro_batch, sample.phase) for sample in samples)]


@pytest.mark.parametrize("strategy", ["ours", "lightning"])
def test_one_optimizer_step_is_drawn(strategy: str, tmp_path: Path) -> None:
    """The phases of a cycle of two, in order, beginning with what lives between steps; with any strategy."""
    module, timeline = Model(), MemoryTimeline(dirpath=str(tmp_path))
    ours = gacp.GACPStrategy(accumulate_grad_batches=2, num_items="samples")
    settings = {"strategy": ours} if strategy == "ours" else {"strategy": "auto", "accumulate_grad_batches": 2}
    fit(module, timeline, **settings)
    assert timeline.path == tmp_path / "gacp_memory.png"
    assert timeline.path.read_bytes().startswith(b"\x89PNG")
    samples = read(tmp_path / "gacp_memory.json")
    assert runs(samples) == [(0, "forward"), (0, "backward"), (1, "forward"), (1, "backward"), (1, "step")]
    parameters = sum(parameter.numel() * 4 for parameter in module.parameters())
    counters = 4 * len(list(module.parameters()))  # Adam's own count of steps, one float a parameter
    assert samples[0].bytes == 4 * parameters + counters  # parameters, gradients and two states
    lowest = min(sample.bytes for sample in samples if (sample.micro_batch, sample.phase) == (0, "forward"))
    gradients_stay = lowest >= 4 * parameters  # through the next forward, as Lightning keeps them
    assert gradients_stay == (strategy == "lightning")


def test_recomputation_shows(tmp_path: Path) -> None:
    """Less at the peak, and spans of recomputation; the first picture can be compared with."""
    plain, recomputed = (MemoryTimeline(dirpath=str(tmp_path / name)) for name in ("plain", "recomputed"))
    fit(Model(), plain)
    fit(Model(), ActivationCheckpointing(), recomputed)
    before, after = (read(tmp_path / name / "gacp_memory.json") for name in ("plain", "recomputed"))
    assert {sample.phase for sample in after} - {sample.phase for sample in before} == {"recompute"}
    assert max(sample.bytes for sample in after) < max(sample.bytes for sample in before)
    compared = MemoryTimeline(compare_with=str(tmp_path / "plain" / "gacp_memory.json"), dirpath=str(tmp_path / "both"))
    fit(Model(), ActivationCheckpointing(), compared)
    assert compared.before == before
    assert (tmp_path / "both" / "gacp_memory.png").stat().st_size > 10_000


def test_it_is_written_beside_the_logs(tmp_path: Path) -> None:
    trainer = fit(Model(), MemoryTimeline(), logger=CSVLogger(tmp_path))
    assert (Path(str(trainer.log_dir)) / "gacp_memory.png").exists()


def test_training_is_not_changed(tmp_path: Path) -> None:
    """Weights after a recorded fit are those of an unrecorded one, to the bit."""
    torch.manual_seed(1)
    recorded = Model()
    fit(recorded, MemoryTimeline(dirpath=str(tmp_path)))
    torch.manual_seed(1)
    plain = Model()
    fit(plain)
    for left, right in zip(recorded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right)


def test_recording_stops_with_an_exception(tmp_path: Path) -> None:
    timeline = MemoryTimeline(dirpath=str(tmp_path))
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(Model(fails=True), timeline)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not list(tmp_path.iterdir())


def test_bad_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="step=-1"):
        MemoryTimeline(step=-1)
    with pytest.raises(FileNotFoundError):
        MemoryTimeline(compare_with=str(tmp_path / "nothing.json"))
    monkeypatch.setattr(memory_timeline, "_MATPLOTLIB", False)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-gacp\[plots\]"):
        MemoryTimeline()


def test_numbers_are_plain_json(tmp_path: Path) -> None:
    fit(Model(), MemoryTimeline(dirpath=str(tmp_path)))
    rows = json.loads((tmp_path / "gacp_memory.json").read_text())
    assert all(len(row) == 4 for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


def test_no_picture_is_said(tmp_path: Path) -> None:
    """Eight micro-batches in cycles of two are four steps, from 0: there is no step 4."""
    with pytest.warns(UserWarning, match=r"`MemoryTimeline\(step=4\)` .* after 4 optimizer steps.*`step=3` or less"):
        fit(Model(), MemoryTimeline(step=4, dirpath=str(tmp_path)))
    assert not list(tmp_path.iterdir())
    fit(Model(), MemoryTimeline(step=3, dirpath=str(tmp_path)))  # warnings are errors
    assert (tmp_path / "gacp_memory.png").exists()


def test_validation_in_every_cycle_is_said(tmp_path: Path) -> None:
    class Validated(Model):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.net(batch)

        def val_dataloader(self) -> Any:
            return DataLoader(torch.randn(1, 8))  # type: ignore[arg-type]

    with pytest.warns(UserWarning, match="a validation fell into each cycle"):
        fit(Validated(), MemoryTimeline(dirpath=str(tmp_path)), val_check_interval=1, num_sanity_val_steps=0)


def test_another_recording_is_drawn_on_the_axis_of_this_one() -> None:
    """Micro-batch on micro-batch where there are as many, else the whole on the whole."""
    ours = [Sample(ms, 1, "forward", place) for ms, place in ((0, 0), (10, 0), (15, 1), (40, 1), (50, 2))]
    theirs = [Sample(ms, 1, "forward", place) for ms, place in ((0, 0), (50, 0), (100, 0), (200, 1), (300, 2))]
    assert borders(ours) == [0, 10, 40, 50]
    assert times_of(theirs, ours) == [0, 5, 10, 40, 50]
    theirs[-1:] = []
    assert times_of(theirs, ours) == [0, 12.5, 25, 50]  # of two micro-batches onto one of three
