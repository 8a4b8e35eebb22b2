"""The arithmetic of one accumulation cycle. Plain Python numbers: it can be checked with a pencil.

A cycle is a run of micro-batches between two optimizer steps. With mean losses ``L_i`` over ``n_i`` items, ``N`` the
items of the whole cycle on all ranks and ``W`` ranks whose gradients are averaged, the gradient of the step must be
``sum_i n_i L_i / N``: what one big batch would give. ``N`` is not known before the last micro-batch, so:

* while the cycle is open a loss is weighted by ``n_i / R``, where ``R`` is a reference count that is the same on
  every rank (the mean count per rank of the first micro-batch that has items). ``R`` only keeps the numbers near 1,
  which fp16 needs;
* before the backward of the last micro-batch the gradients gathered so far are multiplied by ``R / (N / W)``, and the
  last loss is weighted by ``n_last / (N / W)``.

Example: counts 6 and 2 on one rank. ``R = 6``; the first loss is weighted by 6/6 = 1. At the second ``N = 8``: what is
gathered is multiplied by 6/8, the second loss is weighted by 2/8. The sum is ``(6 L_1 + 2 L_2) / 8``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from torch import Tensor

LossReduction = Literal["mean", "sum", "prescaled"]
SumOverRanks = Callable[[Sequence[float]], Sequence[float]]


def _alone(values: Sequence[float]) -> Sequence[float]:
    return values


class MicroBatch(NamedTuple):
    """What to do with one micro-batch.

    Attributes:
        weight: Factor for this micro-batch's loss. 0.0 means: run no backward (a loss over no items may be NaN, and no
            factor turns NaN into nothing).
        factor: Factor for the gradients gathered earlier in this cycle, to be applied before this backward.
    """

    weight: float
    factor: float = 1.0


_UNWEIGHTED = MicroBatch(1.0)


@dataclass(frozen=True)
class CycleResult:
    """A finished cycle, for loggers.

    Attributes:
        index: Running number of the cycle, from 0.
        micro_batches: Micro-batches that this rank ran in it.
        num_items: Items on this rank.
        total_items: Items on all ranks.
        stepped: Whether the optimizer stepped (a cycle without items, or one whose step a gradient scaler skipped,
            did not).
        loss: 0-dim tensor on the device, detached: the mean of the loss over this rank's items. ``None`` without items.
    """

    index: int
    micro_batches: int
    num_items: float
    total_items: float
    stepped: bool
    loss: Tensor | None


class AccumulationCycle:
    """Where a cycle stands: counts what has been seen and says how each micro-batch is weighted.

    In a plain PyTorch loop::

        cycle = AccumulationCycle()
        for i, (inputs, targets) in enumerate(micro_batches):
            step = cycle.add(num_items=(targets != -100).sum().item(), last=i + 1 == len(micro_batches))
            if step.factor != 1.0:
                torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], step.factor)
            if step.weight:
                (mean_loss(model(inputs), targets) * step.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        cycle.reset()

    Args:
        loss_reduction: ``"mean"``: each loss is a mean over its items. ``"sum"``: a sum over its items.
            ``"prescaled"``: it has been divided by the items of the whole cycle already.
        world_size: Number of ranks whose gradients are averaged (``W``).
        sum_over_ranks: Adds up a short list of numbers over these ranks; called once or twice a cycle, in the same
            order on every rank. The default is one rank alone.
        average_across_ranks: ``True``: the step is the mean over the items of all ranks. ``False``: every rank takes
            the mean over its own items, and ranks weigh the same.

    Raises:
        ValueError: For an unknown ``loss_reduction``.
    """

    def __init__(
        self,
        loss_reduction: LossReduction = "mean",
        world_size: int = 1,
        sum_over_ranks: SumOverRanks = _alone,
        average_across_ranks: bool = True,
    ) -> None:
        if loss_reduction not in get_args(LossReduction):
            raise ValueError(
                f"`loss_reduction={loss_reduction!r}` is not known: write one of"
                f" {', '.join(map(repr, get_args(LossReduction)))}."
            )
        self.loss_reduction = loss_reduction
        self.world_size = world_size
        self.average_across_ranks = average_across_ranks
        self._sum_over_ranks = sum_over_ranks
        self.reset()

    def reset(self) -> None:
        """Starts the next cycle."""
        self.micro_batches = 0
        self.losses = 0  # of them, how many gave a loss
        self.items: float = 0.0
        self.total_items: float = 0.0
        self.reference: float | None = None
        self.closed = False
        self._losses_without_items = 0.0

    @property
    def open(self) -> bool:
        """Whether micro-batches have been seen whose step is still to come."""
        return self.micro_batches > 0 and not self.closed

    @property
    def empty(self) -> bool:
        """Whether the closed cycle had losses but not one item on any rank: there is nothing to step with."""
        return self.closed and self.total_items == 0 and self._losses_without_items > 0

    def add(self, num_items: float, last: bool, has_loss: bool = True, divided_by: float = 1.0) -> MicroBatch:
        """Takes the next micro-batch in.

        Args:
            num_items: Items its loss is a mean or sum over, on this rank.
            last: Whether the optimizer steps after it. Must be the same on all ranks.
            has_loss: ``False`` for a micro-batch that was run but gave no loss: its items do not count.
            divided_by: What the loss has been divided by already, and the weight undoes (Lightning divides by the
                length of a cycle). The reference is multiplied by it, so that equal counts give weights of exactly 1.

        Returns:
            The weight of its loss, and the factor for the gradients gathered before it.

        Raises:
            ValueError: For a negative or non-finite count.
            RuntimeError: If the cycle is closed already.
        """
        if self.closed:
            raise RuntimeError("This cycle is closed: call `reset()` before the next micro-batch.")
        if not 0 <= num_items < math.inf:
            raise ValueError(f"A micro-batch has `num_items={num_items!r}`: the count must be finite and not negative.")
        items = float(num_items) if has_loss else 0.0
        self.micro_batches += 1
        self.losses += has_loss
        self.items += items
        self._losses_without_items += has_loss and items == 0
        return self._close(items, divided_by) if last else self._gather(items, divided_by)

    def _gather(self, items: float, divided_by: float) -> MicroBatch:
        if self.loss_reduction == "prescaled":
            return MicroBatch(self._prescaled_weight(items) * divided_by)
        if self.reference is None:
            # Every rank comes here until one of them has items, so the collective is entered by all or by none.
            mean = self._sum_over_ranks([items])[0] / self.world_size
            if mean == 0:
                return MicroBatch(0.0)
            self.reference = mean * divided_by
        weight = self._numerator(items) * divided_by / self.reference
        return _UNWEIGHTED if weight == 1.0 else MicroBatch(weight)

    def _close(self, items: float, divided_by: float) -> MicroBatch:
        self.closed = True
        self.total_items, self._losses_without_items = self._sum_over_ranks([self.items, self._losses_without_items])
        if self.loss_reduction == "prescaled":
            return MicroBatch(self._prescaled_weight(items) * divided_by)
        share = self.total_items / self.world_size if self.average_across_ranks else self.items
        if share == 0:  # no items: what was gathered is nothing but zeros
            return MicroBatch(0.0)
        factor = 1.0 if self.reference is None else self.reference / share
        return MicroBatch(self._numerator(items) * divided_by / share, factor)

    def _numerator(self, items: float) -> float:
        return items if self.loss_reduction == "mean" else float(items > 0)

    def _prescaled_weight(self, items: float) -> float:
        """All that is left to undo is the mean over ranks, which divides by ``W`` what was divided by ``N``."""
        if items == 0:
            return 0.0
        return float(self.world_size) if self.average_across_ranks else 1.0

    def state_dict(self) -> dict[str, float | None]:
        """The position inside an open cycle, as plain numbers."""
        return {
            "micro_batches": self.micro_batches,
            "losses": self.losses,
            "items": self.items,
            "reference": self.reference,
            "losses_without_items": self._losses_without_items,
        }

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Continues inside the cycle that ``state_dict`` was taken in."""
        self.reset()
        self.micro_batches = int(state["micro_batches"] or 0)
        self.losses = int(state["losses"] or 0)
        self.items = float(state["items"] or 0.0)
        self.reference = state["reference"]
        self._losses_without_items = float(state["losses_without_items"] or 0.0)
