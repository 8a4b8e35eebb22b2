"""Counting under ``training_step(self, dataloader_iter)``, where the module fetches its batches itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcherWrapper


class CountingIterator(Iterator[Any]):
    """Lightning's ``dataloader_iter``, which counts every batch as it is fetched, on the host.

    Args:
        iterator: Lightning's; everything but fetching is its own.
        count: Called with each batch.
    """

    def __init__(self, iterator: Any, count: Callable[[Any], None]) -> None:
        self._iterator = iterator
        self._count = count

    def __next__(self) -> Any:
        """The next ``(batch, batch_idx, dataloader_idx)``."""
        fetched = next(self._iterator)
        self._count(fetched[0])
        return fetched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def fetches_itself(args: tuple[Any, ...]) -> bool:
    """Whether the arguments of a ``training_step`` are Lightning's iterator."""
    return bool(args) and type(args[0]) is _DataFetcherWrapper
