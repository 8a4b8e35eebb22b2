"""The benchmark: whole on the simulated device, and its way through all sizes and variants of a GPU on stand-ins."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gacp.offload.accelerator import AcceleratorDevice

from .simulated import SimulatedDevice

PATH = Path(__file__).parents[2] / "benchmarks" / "offload.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, under a name that is not that of these tests."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("benchmark_of_offload", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script on something that looks like a GPU, with small models."""
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache", "empty_host_cache"):
        assert callable(getattr(torch.accelerator, name))
        monkeypatch.setattr(torch.accelerator, name, lambda: None)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda: 5 << 30)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cpu"))
    monkeypatch.setattr(AcceleratorDevice, "find", SimulatedDevice)
    monkeypatch.setattr(benchmark, "SIZES", [(128, 16), (256, 16)])
    monkeypatch.setattr(benchmark, "DEPTH", 2)
    return benchmark


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """The figures that the script writes."""
    monkeypatch.setattr(sys, "argv", ["offload.py", "--out", "figures.json", "--plot", "figures.png", *arguments])
    script.main()
    figures: dict[str, Any] = json.loads(Path("figures.json").read_text())
    return figures


def test_without_an_accelerator_it_tells_bytes_waits_and_the_schedule(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    figures = run(benchmark, monkeypatch)
    assert figures["device"] == "simulated"
    inputs, half, whole = figures["rows"]
    # Of six blocks the last keeps its input, and that of the one before is not gone yet when its backward comes.
    assert inputs["bytes out"] == 5 * inputs["bytes of a block's input"]
    assert inputs["bytes in"] == 4 * inputs["bytes of a block's input"]
    assert inputs["schedule"].split() == ["out:4096"] * 5 + ["in:4096"] * 4
    assert inputs["bytes out"] < half["bytes out"] < whole["bytes out"]
    assert {row["unordered accesses"] for row in figures["rows"]} == {0}
    assert all(row["waits"]["SOURCE_WRITTEN"] > 0 and row["served"]["ahead"] > 0 for row in figures["rows"])


def test_on_a_gpu_it_has_all_sizes_and_contenders(benchmark: Any) -> None:
    assert {hidden for hidden, _ in benchmark.SIZES} == {1024, 2048, 4096}
    assert {tokens for _, tokens in benchmark.SIZES} == {2048, 8192, 32768}
    names = list(benchmark.VARIANTS)
    assert all(names.index(base) < names.index(name) for name, base in benchmark.AGAINST.items())
    assert len(names) == 9


def test_on_a_gpu_it_writes_a_row_for_each_and_a_plot(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    figures = run(gpu, monkeypatch)
    rows = {(row["hidden"], row["variant"]): row for row in figures["rows"]}
    assert len(rows) == 2 * len(gpu.VARIANTS)
    for hidden in (128, 256):
        assert rows[hidden, "nothing"]["milliseconds"] > 0 and "over" in rows[hidden, "all, ours"]
        assert rows[hidden, "inputs, ours"]["peak_gib"] == 5 and "over" not in rows[hidden, "checkpoint"]
    assert Path("figures.png").stat().st_size > 0


def test_whatever_a_contender_does_the_others_are_measured(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: BaseException) -> Any:
        def variant(model: Any) -> Any:
            raise error

        return variant

    broken = {
        "checkpoint": failing(torch.OutOfMemoryError("out")),
        "inputs, torchtune": failing(ImportError("no", name="torchtune")),
        "inputs, TRL": failing(AssertionError("backward should have cleared")),
    }
    names = [*broken, "inputs, ours"]
    monkeypatch.setattr(gpu, "VARIANTS", {name: broken.get(name, gpu.VARIANTS[name]) for name in names})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    rows = run(gpu, monkeypatch)["rows"]
    assert [row.get("failed") for row in rows[:4]] == [
        "out of memory",
        "not installed: torchtune",
        "AssertionError: backward should have cleared",
        None,
    ]
    assert "over" not in rows[3], "there is nothing to measure it against"


def test_no_variant_is_begun_when_the_time_is_up(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(gpu, monkeypatch, "--seconds", "-1")["rows"] == []
