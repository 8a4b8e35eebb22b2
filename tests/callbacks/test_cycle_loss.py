"""`CycleLoss` is the mean over items, against the mean of all items' losses in one list."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_gacp.callbacks.cycle_loss import CycleLoss


@given(st.lists(st.lists(st.floats(-10, 10, width=32), max_size=7), min_size=1, max_size=6))
def test_any_partition_gives_the_mean_over_items(partition: list[list[float]]) -> None:
    metric = CycleLoss()
    for losses in partition:
        values = torch.tensor(losses)
        metric.update(values.mean(), num_items=len(losses))  # NaN where there are no items
    everything = torch.tensor([value for losses in partition for value in losses])
    torch.testing.assert_close(metric.compute(), everything.mean(), equal_nan=True, rtol=1e-5, atol=1e-5)


def test_ranks_add_up() -> None:
    """What two ranks have is combined by the items each holds, not by the mean of their means."""
    metric = CycleLoss(
        distributed_available_fn=lambda: True,
        dist_sync_fn=lambda sums, group: [sums, torch.tensor([5.0 * 30, 30.0])],  # the other rank: 30 items at 5
    )
    metric.update(torch.tensor(1.0), num_items=10)
    assert metric.compute() == torch.tensor(4.0)


def test_a_graph_is_not_kept() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    metric = CycleLoss()
    metric.update(loss, num_items=1)
    assert not metric.compute().requires_grad


@pytest.mark.parametrize(("loss", "num_items"), [(torch.tensor(1.0), -1), (None, 3)])
def test_impossible_counts_are_refused(loss: Tensor | None, num_items: float) -> None:
    with pytest.raises(ValueError, match=f"num_items={num_items}"):
        CycleLoss().update(loss, num_items)
