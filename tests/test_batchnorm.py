"""The weight of a cycle of micro-batches in the running statistics of batch norm."""

import pytest
import torch
from torch import nn

from lightning_gacp.batchnorm import batch_norms, momentum_in_cycle, scaled_momentum


@pytest.mark.parametrize("length", [1, 2, 3, 7])
@pytest.mark.parametrize("momentum", [0.01, 0.1, 0.9, 1.0])
def test_each_micro_batch_weighs_the_same_and_all_as_one_batch(momentum: float, length: int) -> None:
    weights, past = [], 1.0
    for index in range(length):
        scaled = momentum_in_cycle(momentum, index, length)
        weights = [weight * (1 - scaled) for weight in weights] + [scaled]
        past *= 1 - scaled
    assert past == pytest.approx(1 - momentum, abs=1e-12)
    assert weights == pytest.approx([momentum / length] * length, abs=1e-12)


def test_a_cycle_alone_changes_nothing() -> None:
    assert momentum_in_cycle(0.1, 0, 1) == 0.1


@pytest.mark.parametrize("length", [2, 4])
def test_running_mean_after_a_cycle_is_that_of_the_big_batch(length: int) -> None:
    torch.manual_seed(0)
    big = nn.BatchNorm1d(3, momentum=0.3).double()
    cycle = nn.BatchNorm1d(3, momentum=0.3).double()
    for _ in range(3):
        batch = torch.randn(length * 4, 3, dtype=torch.float64) + 2
        big(batch)
        for index, micro_batch in enumerate(batch.chunk(length)):
            with scaled_momentum([cycle], index, length):
                cycle(micro_batch)
        torch.testing.assert_close(cycle.running_mean, big.running_mean, atol=1e-12, rtol=0)
    assert cycle.momentum == 0.3


def test_momentum_is_given_back_after_an_exception() -> None:
    layer, cumulative = nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None)
    with pytest.raises(KeyError), scaled_momentum([layer, cumulative], 0, 4):
        assert layer.momentum == momentum_in_cycle(0.1, 0, 4)
        assert cumulative.momentum is None
        raise KeyError
    assert layer.momentum == 0.1


def test_layers_that_concern_it() -> None:
    model = nn.ModuleDict(
        {
            "norm": nn.BatchNorm2d(2),
            "frozen": nn.BatchNorm1d(2).eval(),
            "stateless": nn.BatchNorm1d(2, track_running_stats=False),
            "group": nn.GroupNorm(1, 2),
        }
    )
    assert list(batch_norms(model)) == ["norm"]
