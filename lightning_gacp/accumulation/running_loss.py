"""The loss of a cycle, summed on the device without synchronising it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gacp.accumulation.cycle import AccumulationCycle

# So many losses are kept before they are added up: one after the other takes a fraction of the time that each alone
# takes between a forward and a backward.
_KEPT = 32


class RunningLoss:
    """Adds up the losses of a cycle in one 0-dim tensor."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._kept: list[tuple[Tensor, float]] = []

    def add(self, loss: Tensor, factor: float, keep: bool = False) -> None:
        """Adds ``loss * factor``; a loss of more than one element is not a mean over anything and is left out.

        Args:
            loss: Of any shape and dtype.
            factor: What it counts for.
            keep: Whether the tensor, which nobody changes before the end of the cycle, may be kept to be added later.
        """
        if loss.numel() != 1:
            return
        self._kept.append((loss.detach() if loss.requires_grad else loss, factor))
        if not keep or len(self._kept) == _KEPT:
            self._add_kept()

    def _add_kept(self) -> None:
        kept, self._kept = self._kept, []
        for loss, factor in kept:
            if self._sum is None or self._sum.device != loss.device:
                dtype = torch.float64 if loss.dtype == torch.float64 else torch.float32
                self._sum = torch.zeros((), dtype=dtype, device=loss.device)
            self._sum.add_(loss if loss.ndim == 0 else loss.reshape(()), alpha=factor)

    @staticmethod
    def items_of(cycle: AccumulationCycle) -> float:
        """What the sum of a cycle's losses is to be divided by, for their mean over the items of this rank.

        ``add`` must have been given ``num_items`` as factor for mean losses, and 1 for sums and prescaled losses.
        """
        if cycle.loss_reduction != "prescaled" or cycle.items == 0:
            return cycle.items
        # Prescaled losses were divided by all items that the step averages over.
        return cycle.items / (cycle.total_items if cycle.average_across_ranks else cycle.items)

    def mean(self, items: float) -> Tensor | None:
        """The sum over ``items``: a new 0-dim tensor; ``None`` without items or losses."""
        total = self.total
        return None if total is None or items == 0 else total / items

    @property
    def total(self) -> Tensor | None:
        """The sum so far, a 0-dim tensor; ``None`` before the first loss."""
        self._add_kept()
        return self._sum

    def restore(self, total: float | None, device: torch.device) -> None:
        """Continues from a sum that ``total`` gave."""
        self._kept.clear()
        self._sum = None if total is None else torch.tensor(total, device=device)
