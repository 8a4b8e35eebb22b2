"""The mean loss per item, over micro-batches that hold different numbers of items, as a torchmetrics metric."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class CycleLoss(Metric):
    """Mean loss per item over micro-batches and ranks, each weighted by the items that it holds.

    Usable alone, with any Trainer or none. A mean of micro-batch means is not the loss of the batch when the counts
    differ; this is. A micro-batch without items (whose mean is 0/0) changes nothing.

    Args:
        kwargs: Those of `torchmetrics.Metric` (``sync_on_compute``, ``process_group`` and so on).

    Example:
        >>> loss = CycleLoss()
        >>> loss.update(torch.tensor(2.0), num_items=30)
        >>> loss.update(torch.tensor(4.0), num_items=10)
        >>> loss.compute()
        tensor(2.5000)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    sums: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # One tensor, so that a synchronisation over ranks is one collective: (sum of the losses of all items, items).
        self.add_state("sums", default=torch.zeros(2), dist_reduce_fx="sum")

    def update(self, loss: Tensor | None, num_items: float) -> None:
        """Take one micro-batch, or one rank's part of a cycle, in.

        Args:
            loss: Mean loss over its items, a tensor of one element; ``None`` or anything where there are no items.
            num_items: Items that the mean is over.

        Raises:
            ValueError: For a negative count, or items without a loss.
        """
        if num_items < 0:
            raise ValueError(f"`num_items={num_items}` must not be negative.")
        if num_items == 0:
            return
        if loss is None:
            raise ValueError(f"`loss=None` was given with `num_items={num_items}`; give the mean loss of these items.")
        # Filled on the device: reading the loss here would wait for it.
        self.sums[0] += loss.detach().reshape(()).to(self.sums) * num_items
        self.sums[1] += num_items

    def compute(self) -> Tensor:
        """Return the mean loss per item, a 0-dim float32 tensor; NaN when there were no items."""
        return self.sums[0] / self.sums[1]
