"""What every test gets: one thread, a seed, no accelerator unless asked for, and a folder of its own for logs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


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
