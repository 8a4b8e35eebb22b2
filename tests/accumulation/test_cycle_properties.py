"""For any partition of a batch into micro-batches and ranks, the step is the big-batch step: to 1e-12 in float64.

Ranks are threads that meet in a barrier to add their numbers up. Each item has a gradient of its own; a micro-batch
without items has NaN for a gradient, as a mean over nothing has.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from lightning_gacp.accumulation import AccumulationCycle

WIDTH = 3
REDUCTIONS = ["mean", "sum", "prescaled"]
TOLERANCES = [(torch.float64, 1e-12), (torch.float32, 1e-6)]


class Meeting:
    """Adds lists of numbers up over threads; every thread must come the same number of times."""

    def __init__(self, ranks: int) -> None:
        self.lists: list = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=30)
        self.times = [0] * ranks

    def of(self, rank: int):
        def add_up(values):
            self.times[rank] += 1
            self.lists[rank] = list(values)
            self.barrier.wait()
            total = [sum(column) for column in zip(*self.lists, strict=True)]
            self.barrier.wait()
            return total

        return add_up


def on_threads(ranks: int, function):
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(function, range(ranks)))


@st.composite
def partitions(draw):
    """Items per rank and micro-batch: the same number of micro-batches on all ranks, any counts, many of them zero."""
    ranks = draw(st.integers(1, 4))
    length = draw(st.integers(1, 6))
    count = st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 60))
    return draw(st.lists(st.lists(count, min_size=length, max_size=length), min_size=ranks, max_size=ranks))


def micro_gradients(counts: list[list[int]], reduction: str, denominators: list[float], seed: int):
    """Gradients of the items, and of each micro-batch's loss as ``reduction`` has it."""
    generator = torch.Generator().manual_seed(seed)
    items, micro = [], []
    for row, denominator in zip(counts, denominators, strict=True):
        # positive: a sum that cancels to nothing has no relative error worth the name
        items.append([torch.rand(n, WIDTH, dtype=torch.float64, generator=generator) + 0.1 for n in row])
        divide = {"mean": lambda n: n, "sum": lambda n: 1.0, "prescaled": lambda n, d=denominator: d}[reduction]
        nothing = torch.full((WIDTH,), float("nan"), dtype=torch.float64)
        micro.append([g.sum(0) / divide(len(g)) if len(g) else nothing for g in items[-1]])
    return items, micro


def run(counts, micro, reduction, average, reduce_every, scale_late):
    """What the strategies do with the cycle's answers; the gradient that the optimizer would see, or ``None``."""
    ranks = len(counts)
    meeting, exchange = Meeting(ranks), Meeting(ranks)

    def rank_runs(rank: int) -> tuple[Tensor, AccumulationCycle]:
        cycle = AccumulationCycle(reduction, ranks, meeting.of(rank), average)
        mean_over_ranks = exchange.of(rank)
        gathered = torch.zeros(WIDTH, dtype=micro[0][0].dtype)
        for i, count in enumerate(counts[rank]):
            step = cycle.add(count, last=i == len(counts[rank]) - 1)
            weight, factor = step.weight, step.factor
            if scale_late:
                weight /= factor
            else:
                gathered = gathered * factor
            new = micro[rank][i] * weight if weight else torch.zeros_like(gathered)
            if reduce_every:
                new = torch.stack(mean_over_ranks([new])).squeeze(0) / ranks
            gathered = gathered + new
            if scale_late:
                gathered = gathered * factor
        if not reduce_every:
            gathered = torch.stack(mean_over_ranks([gathered])).squeeze(0) / ranks
        return gathered, cycle

    results = on_threads(ranks, rank_runs)
    assert len(set(meeting.times)) == 1  # every rank entered the same collectives
    assert meeting.times[0] <= len(counts[0]) + 1
    for gradient, _ in results:
        assert torch.equal(gradient, results[0][0])
    return results[0][0], [cycle for _, cycle in results]


@settings(max_examples=400, deadline=None)
@given(
    partitions(),
    st.sampled_from(REDUCTIONS),
    st.booleans(),
    st.sampled_from(["once", "every", "once, scaled late"]),
    st.integers(0, 2**20),
    st.sampled_from(TOLERANCES),
)
def test_any_partition_gives_the_big_batch_step(counts, reduction, average, how, seed, dtype_and_tolerance):
    dtype, tolerance = dtype_and_tolerance
    if how == "every" and not average:
        how = "once"  # where each micro-batch is reduced, a rank's own count comes too late: the strategies refuse it
    ranks = len(counts)
    total = sum(map(sum, counts))
    denominators = [float(total if average else sum(row)) for row in counts]
    items, micro = micro_gradients(counts, reduction, denominators, seed)
    micro = [[gradient.to(dtype) for gradient in row] for row in micro]
    found, cycles = run(counts, micro, reduction, average, how == "every", how == "once, scaled late")

    if total == 0:
        assert all(cycle.empty for cycle in cycles)
        assert torch.equal(found, torch.zeros(WIDTH, dtype=dtype))
        return
    assert not any(cycle.empty for cycle in cycles)
    assert {cycle.total_items for cycle in cycles} == {float(total)}
    if average:
        expected = torch.cat([g for row in items for g in row]).sum(0) / total
    else:
        own = [torch.cat(row).sum(0) / sum(map(len, row)) for row in items if sum(map(len, row))]
        expected = torch.stack(own).sum(0) / ranks
    error = (found - expected).norm() / expected.norm()
    assert error < tolerance, (error, counts)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=8), st.sampled_from(REDUCTIONS), st.data())
def test_a_cycle_continues_from_its_state(counts, reduction, data):
    """Saved after any micro-batch and restored into a new cycle, all later answers are the same."""
    cut = data.draw(st.integers(0, len(counts) - 1))
    whole, first = AccumulationCycle(reduction), AccumulationCycle(reduction)
    answers = [whole.add(n, last=i == len(counts) - 1) for i, n in enumerate(counts)]
    for count in counts[:cut]:
        first.add(count, last=False)
    second = AccumulationCycle(reduction)
    second.load_state_dict(first.state_dict())
    assert second.open == (cut > 0)
    continued = [second.add(n, last=i == len(counts) - 1) for i, n in enumerate(counts) if i >= cut]
    assert continued == answers[cut:]
    assert (second.items, second.total_items, second.empty) == (whole.items, whole.total_items, whole.empty)


@pytest.mark.parametrize("dtype, tolerance", TOLERANCES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_plain_pytorch_loop(dtype, tolerance, reduction):
    """The loop of `AccumulationCycle`'s documentation, on a network, over the items of a whole batch cut anywhere."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 5, generator=generator).to(dtype)
    targets = torch.randint(7, (24,), generator=generator)
    targets[[0, 5, 6, 7, 8, 20]] = -100  # the cut 5:9 has nothing left
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 7)).to(dtype)
    F.cross_entropy(model(inputs), targets).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    total = int((targets != -100).sum())

    cycle = AccumulationCycle(reduction)
    edges = [0, 1, 5, 9, 18, 24]
    for start, end in itertools.pairwise(edges):
        some = targets[start:end]
        step = cycle.add(num_items=int((some != -100).sum()), last=end == 24)
        if step.factor != 1.0:
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], step.factor)
        if step.weight:
            loss = F.cross_entropy(model(inputs[start:end]), some, reduction="mean" if reduction == "mean" else "sum")
            if reduction == "prescaled":
                loss = loss / total
            (loss * step.weight).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (found - expected).norm() / expected.norm() < tolerance
