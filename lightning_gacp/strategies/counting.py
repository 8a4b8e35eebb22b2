"""Counting the items of train batches for a strategy, and saying once what is counted."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_gacp.accumulation.auto import EqualWeights, choose_counter
from lightning_gacp.accumulation.counters import Counter


class ItemCount:
    """The counter of one fit.

    Args:
        counter: A counter; ``"auto"``: chosen at the first batch; ``None``: every micro-batch counts as one.
        module: The module that is trained.

    Attributes:
        described: What is counted, in words; empty until it is known.
        announced: Whether all has been said about it.
    """

    def __init__(self, counter: Counter | str | None, module: nn.Module) -> None:
        self._module = module
        self._counter: Counter | None = counter if callable(counter) else None
        if counter is None:
            self._counter = EqualWeights()
        self.described = ""
        self._advice = ""
        self.announced = False

    def __call__(self, batch: Any) -> float:
        """Counts a batch on the host.

        Raises:
            ValueError: If the counter does not find what it counts.
            TypeError: If it gives no number.
        """
        counter = self._counter
        if counter is None:
            counter = self._counter = choose_counter(self._module, batch)
        counted = counter(batch)
        try:
            return float(counted)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"The counter `{self._counter!r}` gave `{counted!r}` for a batch: return the number of items that its"
                " loss averages over."
            ) from error

    def attempt(self, batch: Any) -> float | Exception:
        """Counts, and keeps an error for when the count is needed: it may be handed over with the loss instead."""
        try:
            return self(batch)
        except Exception as error:
            return error

    def announce(self, strategy: str, length: int, handed_over: bool) -> None:
        """Says what is counted, at the first count that is used; and advises, once weights other than 1 come of it.

        Args:
            strategy: Who speaks.
            length: Micro-batches in a cycle.
            handed_over: Whether counts come with the loss.
        """
        if not self.described:
            self.described = "the items that come with each loss" if handed_over else repr(self._counter)
            cycles = f"cycles of {length} micro-batch{'es' if length > 1 else ''}"
            rank_zero_info(f"{strategy}: {cycles}, weighted by {self.described}")
            if not handed_over and isinstance(self._counter, EqualWeights):
                self._advice = self._counter.advice
        if self._advice and length > 1:  # a schedule may begin with cycles of 1
            rank_zero_warn(self._advice)
            self._advice = ""
        self.announced = not self._advice
