"""The loss of a cycle, summed on the device without synchronising it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gacp.accumulation.cycle import AccumulationCycle


class RunningLoss:
    """Adds up the losses of a cycle in one 0-dim tensor; nothing is allocated per micro-batch."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, loss: Tensor, factor: float) -> None:
        """Adds ``loss * factor``; a loss of more than one element is not a mean over anything and is left out."""
        if loss.numel() != 1:
            return
        if self._sum is None or self._sum.device != loss.device:
            dtype = torch.float64 if loss.dtype == torch.float64 else torch.float32
            self._sum = torch.zeros((), dtype=dtype, device=loss.device)
        loss = loss.detach()
        self._sum.add_(loss if loss.ndim == 0 else loss.reshape(()), alpha=factor)

    def mean(self, cycle: AccumulationCycle) -> Tensor | None:
        """The mean over the cycle's items on this rank: a new 0-dim tensor; ``None`` without items.

        ``add`` must have been given ``num_items`` as factor for mean losses, and 1 for sums and prescaled losses.
        """
        if self._sum is None or cycle.items == 0:
            return None
        if cycle.loss_reduction != "prescaled":
            return self._sum / cycle.items
        # Prescaled losses were divided by all items that the step averages over.
        return self._sum * ((cycle.total_items if cycle.average_across_ranks else cycle.items) / cycle.items)

    @property
    def total(self) -> Tensor | None:
        """The sum so far, a 0-dim tensor; ``None`` before the first loss."""
        return self._sum

    def restore(self, total: float | None, device: torch.device) -> None:
        """Continues from a sum that ``total`` gave."""
        self._sum = None if total is None else torch.tensor(total, device=device)

    def reset(self) -> None:
        """Starts the next cycle."""
        if self._sum is not None:
            self._sum.zero_()
