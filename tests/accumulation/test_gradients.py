"""Gradients scaled, set aside, put back, filled with zeros; the running loss of a cycle."""

from __future__ import annotations

import pytest
import torch

from lightning_gacp.accumulation import AccumulationCycle
from lightning_gacp.accumulation.gradients import SetAside, scale_, zero_loss
from lightning_gacp.accumulation.running_loss import RunningLoss


def parameter(*gradient: float) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(2))
    made.grad = torch.tensor(gradient, dtype=torch.float32) if gradient else None
    return made


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch 2.12, though they are asked for
def test_scale_dense_sparse_and_none():
    sparse = torch.sparse_coo_tensor([[1]], [4.0], (3,), check_invariants=True)
    dense = torch.tensor([1.0, 2.0])
    scale_([dense, None, sparse], 0.5)
    assert dense.tolist() == [0.5, 1.0] and sparse.to_dense().tolist() == [0, 2, 0]


def test_scaling_by_one_touches_nothing():
    gradient = torch.tensor([1.0])
    version = gradient._version
    scale_([gradient], 1.0)
    assert gradient._version == version


def test_aside_and_back():
    p, q = parameter(1, 2), parameter()
    aside = SetAside()
    assert not aside
    aside.take([p, q])
    assert aside and p.grad is None and aside.get(q) is None
    p.grad, q.grad = torch.tensor([9.0, 9.0]), torch.tensor([9.0, 9.0])  # another loss leaves these
    aside.put_back([p, q])
    assert p.grad.tolist() == [1, 2] and q.grad is None and not aside


def test_aside_adds_up():
    p = parameter(1, 2)
    aside = SetAside()
    aside.take([p])
    p.grad = torch.tensor([10.0, 20.0])
    aside.take([p])
    assert [t.tolist() for t in aside.tensors()] == [[11, 22]]
    p.grad = torch.tensor([100.0, 200.0])
    aside.put_back([p], add=True)
    assert p.grad.tolist() == [111, 222]


def test_aside_moves_and_copies():
    """Copied where `.grad` is a view of memory that others write."""
    bucket = torch.tensor([1.0, 2.0])
    p = parameter()
    for copy in (False, True):
        p.grad = bucket.view(2)
        aside = SetAside()
        aside.take([p], copy=copy)
        assert (aside.tensors()[0].data_ptr() == bucket.data_ptr()) is not copy


def test_aside_of_sparse_gradients():
    p = torch.nn.Parameter(torch.ones(3))
    aside = SetAside()
    for value in (1.0, 2.0):
        p.grad = torch.sparse_coo_tensor([[1]], [value], (3,), check_invariants=True)
        aside.take([p])
    p.grad = torch.sparse_coo_tensor([[2]], [5.0], (3,), check_invariants=True)
    aside.put_back([p], add=True)
    assert p.grad.to_dense().tolist() == [0, 3, 5]


def test_a_zero_loss_reaches_every_parameter_whatever_its_value():
    broken = torch.nn.Parameter(torch.tensor([float("nan"), float("inf")]))
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    p = parameter(1, 2)
    seen = []
    broken.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.tolist()))
    with torch.autograd.set_detect_anomaly(True):
        zero_loss([broken, frozen, p]).backward()
    assert seen == [[0.0, 0.0]] and frozen.grad is None and p.grad.tolist() == [1, 2]


@pytest.mark.parametrize("reduction, factors", [("mean", [6, 2]), ("sum", [1, 1]), ("prescaled", [1, 1])])
def test_running_loss_is_the_mean_over_items(reduction, factors):
    """Means 1.5 over 6 items and 5.5 over 2: 2.5 over all 8."""
    divide = {"mean": lambda n: n, "sum": lambda n: 1, "prescaled": lambda n: 8}[reduction]
    cycle, running = AccumulationCycle(reduction), RunningLoss()
    for mean, n, factor in zip((1.5, 5.5), (6, 2), factors, strict=True):
        cycle.add(n, last=n == 2)
        running.add(torch.tensor(mean * n / divide(n)), factor)
    found = running.mean(running.items_of(cycle))
    assert found is not None and found.item() == 2.5 and found.dtype == torch.float32
    running.add(torch.tensor(1.0), 1)
    assert found.item() == 2.5  # a tensor of its own
    assert running.items_of(AccumulationCycle(reduction)) == 0 and running.mean(0) is None


def test_prescaled_running_loss_over_two_ranks():
    """Divided by the 20 items of both ranks already; this rank's mean is over its own 8."""
    cycle = AccumulationCycle("prescaled", 2, lambda values: [values[0] + 12, values[1]])
    cycle.add(8, last=True)
    running = RunningLoss()
    running.add(torch.tensor(2.5 * 8 / 20), 1)
    assert running.mean(running.items_of(cycle)).item() == pytest.approx(2.5, rel=1e-7)


def test_losses_that_are_kept_are_added_in_their_order_and_in_time():
    kept, at_once = RunningLoss(), RunningLoss()
    for step in range(70):
        loss = torch.tensor(0.1 * step, requires_grad=True)
        kept.add(loss, 3.0, keep=True)
        assert len(kept._kept) < 32 and not any(tensor.requires_grad for tensor, _ in kept._kept)
        own = loss.detach().clone()
        at_once.add(own, 3.0)
        own.zero_()  # added already
    assert kept.total is not None and at_once.total is not None
    assert torch.equal(kept.total, at_once.total) and kept.total.item() == pytest.approx(3 * 0.1 * 69 * 35, rel=1e-6)


def test_running_loss_leaves_others_out_and_keeps_float64():
    running, cycle = RunningLoss(), AccumulationCycle()
    running.add(torch.ones(3), 1)  # not a mean over anything
    cycle.add(1, last=True)
    assert running.mean(cycle.items) is None
    running.add(torch.tensor([[0.1]], dtype=torch.float64), 1)
    assert running.mean(cycle.items).item() == 0.1 and running.mean(cycle.items).ndim == 0
    half = RunningLoss()
    half.add(torch.tensor(0.5, dtype=torch.bfloat16), 1)
    assert half.mean(cycle.items).dtype == torch.float32
