"""The arithmetic of a cycle, against numbers computed by hand."""

from __future__ import annotations

import pytest

from lightning_gacp.accumulation import AccumulationCycle, MicroBatch


class TwoRanks:
    """Stands in for the other rank: adds prepared numbers, and keeps what was asked."""

    def __init__(self, *other: list[float]) -> None:
        self.other = list(other)
        self.asked: list[list[float]] = []

    def __call__(self, values):
        self.asked.append(list(values))
        return [mine + theirs for mine, theirs in zip(values, self.other.pop(0), strict=True)]


def test_the_example_of_the_module():
    cycle = AccumulationCycle()
    assert cycle.add(6, last=False) == MicroBatch(weight=1.0, factor=1.0)
    assert cycle.add(2, last=True) == MicroBatch(weight=2 / 8, factor=6 / 8)


def test_three_micro_batches_by_hand():
    """(3 L1 + 1 L2 + 4 L3) / 8: gathered as (3 L1 + 1 L2) / 3, closed with 3/8 and 4/8."""
    cycle = AccumulationCycle()
    assert cycle.add(3, last=False) == MicroBatch(1.0)
    assert cycle.add(1, last=False) == MicroBatch(1 / 3)
    assert cycle.add(4, last=True) == MicroBatch(0.5, factor=0.375)
    assert (cycle.micro_batches, cycle.items, cycle.total_items, cycle.closed) == (3, 8.0, 8.0, True)


def test_a_cycle_of_one_multiplies_nothing():
    """Exactly 1, not nearly: a drop-in changes no bit."""
    for count in (1, 3, 7, 1e9 + 7, 1 / 3):
        assert AccumulationCycle().add(count, last=True) == MicroBatch(weight=1.0, factor=1.0)


def test_sums_are_divided_by_all_items():
    """(S1 + S2) / 8 of sums over 6 and 2 items."""
    cycle = AccumulationCycle("sum")
    assert cycle.add(6, last=False) == MicroBatch(1 / 6)
    assert cycle.add(2, last=True) == MicroBatch(1 / 8, factor=6 / 8)


def test_prescaled_losses_are_left_alone():
    cycle = AccumulationCycle("prescaled")
    assert cycle.add(6, last=False) == MicroBatch(1.0)
    assert cycle.add(0, last=False) == MicroBatch(0.0)
    assert cycle.add(2, last=True) == MicroBatch(1.0)


def test_prescaled_on_two_ranks_undoes_the_mean_over_ranks():
    cycle = AccumulationCycle("prescaled", 2, TwoRanks([4.0, 0.0]))
    assert cycle.add(6, last=True) == MicroBatch(2.0)
    alone = AccumulationCycle("prescaled", 2, TwoRanks([4.0, 0.0]), average_across_ranks=False)
    assert alone.add(6, last=True) == MicroBatch(1.0)


def test_two_ranks_by_hand():
    """This rank: 6 and 2 items; the other: 2 and 10. R = 4, N/W = 10; two small sums over ranks, no more."""
    sums = TwoRanks([2.0], [12.0, 0.0])
    cycle = AccumulationCycle("mean", 2, sums)
    assert cycle.add(6, last=False) == MicroBatch(6 / 4)
    assert cycle.add(2, last=True) == MicroBatch(2 / 10, factor=4 / 10)
    assert sums.asked == [[6.0], [8.0, 0.0]]
    assert (cycle.items, cycle.total_items) == (8.0, 20.0)


def test_each_rank_on_its_own():
    """`average_across_ranks=False`: divided by this rank's 8 items, whatever the other has."""
    cycle = AccumulationCycle("mean", 2, TwoRanks([2.0], [12.0, 0.0]), average_across_ranks=False)
    assert cycle.add(6, last=False) == MicroBatch(6 / 4)
    assert cycle.add(2, last=True) == MicroBatch(2 / 8, factor=4 / 8)


def test_what_the_loss_was_divided_by_is_undone():
    """Equal counts in a cycle as long as the divisor: nothing is multiplied, not even by something close to 1."""
    for length in (3, 7, 49):
        cycle = AccumulationCycle()
        for i in range(length):
            assert cycle.add(5, last=i + 1 == length, divided_by=length) == MicroBatch(1.0)
    cycle = AccumulationCycle()
    assert cycle.add(6, last=False, divided_by=4) == MicroBatch(1.0)
    assert cycle.add(2, last=True, divided_by=4) == MicroBatch(4 * 2 / 8, factor=4 * 6 / 8)
    prescaled = AccumulationCycle("prescaled", 2, lambda values: [2 * value for value in values])
    assert prescaled.add(6, last=False, divided_by=4) == MicroBatch(8.0)


def test_the_reference_waits_for_the_first_items_of_any_rank():
    sums = TwoRanks([0.0], [4.0], [4.0, 2.0])
    cycle = AccumulationCycle("mean", 2, sums)
    assert cycle.add(0, last=False) == MicroBatch(0.0)
    assert cycle.reference is None
    assert cycle.add(0, last=False) == MicroBatch(0.0)  # the other rank had 4: R = 2 on both
    assert cycle.reference == 2.0
    assert cycle.add(1, last=False) == MicroBatch(1 / 2)
    assert cycle.add(3, last=True) == MicroBatch(3 / 4, factor=2 / 4)
    assert len(sums.asked) == 3


def test_no_items_before_the_last_micro_batch():
    cycle = AccumulationCycle()
    cycle.add(0, last=False)
    assert cycle.add(5, last=True) == MicroBatch(1.0)


def test_no_items_in_the_last_micro_batch():
    """What was gathered still has to be brought to its end."""
    cycle = AccumulationCycle()
    cycle.add(2, last=False)
    cycle.add(6, last=False)
    assert cycle.add(0, last=True) == MicroBatch(0.0, factor=2 / 8)


def test_a_cycle_without_items_is_empty():
    cycle = AccumulationCycle()
    assert cycle.add(0, last=False).weight == 0 and not cycle.empty
    assert cycle.add(0, last=True).weight == 0
    assert cycle.empty


def test_a_cycle_without_losses_is_not_empty():
    """A module whose `training_step` gives no loss may still want its optimizer stepped, as with Lightning."""
    cycle = AccumulationCycle()
    cycle.add(4, last=False, has_loss=False)
    cycle.add(4, last=True, has_loss=False)
    assert not cycle.empty and cycle.items == 0


def test_items_of_a_micro_batch_without_loss_do_not_count():
    cycle = AccumulationCycle()
    cycle.add(6, last=False)
    cycle.add(100, last=False, has_loss=False)
    assert cycle.add(2, last=True) == MicroBatch(2 / 8, factor=6 / 8)


def test_a_rank_without_losses_is_empty_where_another_rank_had_some_without_items():
    cycle = AccumulationCycle("mean", 2, TwoRanks([0.0, 1.0]))
    cycle.add(0, last=True, has_loss=False)
    assert cycle.empty


def test_open_and_closed():
    cycle = AccumulationCycle()
    assert not cycle.open and not cycle.closed
    cycle.add(1, last=False)
    assert cycle.open and not cycle.closed
    cycle.add(1, last=True)
    assert not cycle.open and cycle.closed
    with pytest.raises(RuntimeError, match=r"closed: call `reset\(\)`"):
        cycle.add(1, last=True)
    cycle.reset()
    assert cycle.add(2, last=True) == MicroBatch(1.0)


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), -float("inf")])
def test_impossible_counts(count):
    cycle = AccumulationCycle()
    with pytest.raises(ValueError, match="must be finite and not negative"):
        cycle.add(count, last=False)
    assert cycle.micro_batches == 0


def test_unknown_reduction():
    with pytest.raises(ValueError, match="`loss_reduction='median'` is not known: write one of 'mean', 'sum', 'pre"):
        AccumulationCycle("median")  # type: ignore[arg-type]


def test_weights_stay_near_one():
    """A raw sum over items would overflow fp16 at a gradient scaler's default scale: 65536 * 8192 tokens."""
    cycle = AccumulationCycle()
    weights = [cycle.add(8192 + i, last=i == 63).weight for i in range(64)]
    assert max(weights) < 1.01 and min(weights) > 0.01
