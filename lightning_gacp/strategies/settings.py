"""The settings that all strategies share, checked where they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch

from lightning_gacp.accumulation.counters import Counter, make_counter
from lightning_gacp.accumulation.cycle import LossReduction


@dataclass(frozen=True)
class Settings:
    """The arguments of ``AccumulationMixin``, which documents them, in checked form.

    Attributes:
        accumulate_grad_batches: Length of a cycle, or of the cycles from an epoch on, or ``None``: the Trainer's.
        counter: What is counted; ``"auto"``: to be chosen at the first batch; ``None``: every micro-batch weighs the
            same.
        loss_reduction: How ``training_step`` reduces its loss; ``None``: told from its signature.
        average_across_ranks: Whether the mean is over the items of all ranks.
        free_gradients: Whether gradients are released before the next cycle's first forward.
        grad_dtype: The dtype in which gradients are accumulated; ``None``: the parameter's.
        skip_non_finite: Whether a cycle with an infinite or NaN loss or gradient is skipped.
    """

    accumulate_grad_batches: int | dict[int, int] | None
    counter: Counter | str | None
    loss_reduction: LossReduction | None
    average_across_ranks: bool
    free_gradients: bool
    grad_dtype: torch.dtype | None
    skip_non_finite: bool

    @classmethod
    def checked(
        cls,
        accumulate_grad_batches: int | dict[int, int] | None,
        num_items: str | Callable[[Any], Any] | None,
        loss_reduction: LossReduction | None,
        average_across_ranks: bool,
        free_gradients: bool,
        grad_dtype: torch.dtype | str | None,
        skip_non_finite: bool,
    ) -> Settings:
        """Checks the arguments as the user gave them.

        Raises:
            ValueError: For a value that cannot be meant.
            TypeError: For a value of the wrong type.
        """
        if loss_reduction is not None and loss_reduction not in get_args(LossReduction):
            raise ValueError(
                f"`loss_reduction={loss_reduction!r}` is not known: write one of"
                f" {', '.join(map(repr, get_args(LossReduction)))}, or `None` to tell it from `training_step`."
            )
        for name, value in [
            ("average_across_ranks", average_across_ranks),
            ("free_gradients", free_gradients),
            ("skip_non_finite", skip_non_finite),
        ]:
            if not isinstance(value, bool):
                raise TypeError(f"`{name}={value!r}` is no `bool`: write `{name}=True` or `{name}=False`.")
        return cls(
            accumulate_grad_batches=_checked_length(accumulate_grad_batches),
            counter=num_items if num_items is None or num_items == "auto" else make_counter(num_items),
            loss_reduction=loss_reduction,
            average_across_ranks=average_across_ranks,
            free_gradients=free_gradients,
            grad_dtype=_checked_dtype(grad_dtype),
            skip_non_finite=skip_non_finite,
        )

    @property
    def first_length(self) -> int | None:
        """Length of the cycles of the first epoch; ``None``: the Trainer's."""
        return self.length_at(0)

    def length_at(self, epoch: int) -> int | None:
        """Length of a cycle in ``epoch`` (from 0)."""
        if not isinstance(self.accumulate_grad_batches, dict):
            return self.accumulate_grad_batches
        reached = [start for start in self.accumulate_grad_batches if start <= epoch]
        return self.accumulate_grad_batches[max(reached)] if reached else 1


def _checked_length(value: int | dict[int, int] | None) -> int | dict[int, int] | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        if not value:
            raise ValueError("`accumulate_grad_batches={}` has no epoch in it: write e.g. `{0: 8, 4: 4}`, or `None`.")
        lengths = {_integer(epoch, "an epoch"): _positive(length) for epoch, length in value.items()}
        if min(lengths) < 0:
            raise ValueError(f"`accumulate_grad_batches={value}` names a negative epoch: epochs count from 0.")
        return lengths
    return _positive(value)


def _positive(value: Any) -> int:
    length = _integer(value, "a cycle's length")
    if length < 1:
        raise ValueError(
            f"`accumulate_grad_batches={value}` is not possible: a cycle has at least 1 micro-batch. Write `1` for no"
            " accumulation, or `None` to take the Trainer's."
        )
    return length


def _integer(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`accumulate_grad_batches` holds {value!r} as {what}: write an `int`.")
    return value


def _checked_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(value, str):
        found = getattr(torch, value.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"`grad_dtype={value!r}` is no dtype of torch: write e.g. `'float32'`.")
        value = found
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise ValueError(f"`grad_dtype={value!r}` is no floating-point dtype: write e.g. `torch.float32`.")
    return value
