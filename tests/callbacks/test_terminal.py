"""Tables in files and in narrow terminals: no name is cut."""

from __future__ import annotations

import io

import pytest
import rich
from rich.console import Console

from lightning_gacp.callbacks.terminal import flops_text, show, size_text

ROW = (
    "model.encoder.layers.{0,1,2,3,4,5}",
    "6 x TransformerEncoderLayer",
    "recomputed + offloaded",
    "1.50 GiB -> 1.5 MiB",
)


def shown(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=60, color_system=None)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    show("title", ("a", "b", "c", "d"), [ROW], ["a sentence"])
    assert console.width == 60
    return file.getvalue()


def test_a_file_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, terminal=False)
    assert any(all(cell in line for cell in ROW) for line in text.splitlines())
    assert "a sentence" in text


def test_a_narrow_terminal_folds_and_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, terminal=True).splitlines()
    assert max(map(len, lines)) <= 60
    cells = [line.split("│")[1:5] for line in lines if line.startswith("│")]
    columns = ["".join(part.strip() for part in column) for column in zip(*cells, strict=True)]
    assert [column.replace(" ", "") for column in columns] == [cell.replace(" ", "") for cell in ROW]


def test_units() -> None:
    """Powers of 1024 for bytes, of 1000 for operations."""
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 3 << 19: "1.50 MiB", 5 << 30: "5.00 GiB"}
    assert {size: size_text(size) for size in sizes} == sizes
    assert [flops_text(10**power) for power in (6, 9, 12, 15)] == ["1.0 MFLOP", "1.0 GFLOP", "1.0 TFLOP", "1.0 PFLOP"]
