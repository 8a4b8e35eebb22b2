"""What every test gets: one thread, a seed, a folder of its own for logs; and how to run the example scripts."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]

# Lightning's command line uses what jsonargparse is about to rename; that is between the two of them.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

# Read once, at the first product on a GPU; without it, tests could not ask for sums in a fixed order there.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``cuda`` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """One thread: sums come out in the same order everywhere, and small tensors gain nothing from a second."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test starts from the same random numbers, whatever ran before it."""
    torch.manual_seed(20)


@pytest.fixture(autouse=True)
def _away_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loggers and checkpoints write to the working folder unless told otherwise: let it be a temporary one."""
    monkeypatch.chdir(tmp_path)


def load_script(path: Path) -> Any:
    """Import a script that is not part of a package, once, under its file's name."""
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    return sys.modules[path.stem]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """``example("train_lm")`` is the module of that script; its command line is not pytest's."""
    monkeypatch.setattr(sys, "argv", ["example"])
    return lambda name: load_script(ROOT / "examples" / f"{name}.py")


@pytest.fixture
def benchmark_script() -> Callable[[str], Any]:
    """``benchmark_script("saved_bytes")`` is the module of that script."""
    return lambda name: load_script(ROOT / "benchmarks" / f"{name}.py")


@pytest.fixture
def tiny() -> list[str]:
    """Options that make one run of the language model a matter of a second or two: 9 micro-batches, one epoch."""
    return [
        *("--model.width=16", "--model.depth=4", "--model.heads=2", "--model.context=64"),
        *("--data.context=64", "--data.limit=40"),
        *("--trainer.max_epochs=1", "--trainer.val_check_interval=1.0", "--trainer.accelerator=cpu"),
        *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
    ]
