"""``GACPFSDPStrategy`` as far as a machine without an accelerator goes: torch refuses to wrap anything there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_gacp import GACPFSDPStrategy
from tests.strategies.models import Automatic, ragged_batches


def test_settings_of_both() -> None:
    strategy = GACPFSDPStrategy(
        accumulate_grad_batches=4,
        num_items="labels",
        grad_dtype="float32",
        sharding_strategy="SHARD_GRAD_OP",
        cpu_offload=True,
    )
    assert isinstance(strategy, FSDPStrategy)
    assert strategy.settings.first_length == 4
    assert strategy.settings.grad_dtype == torch.float32
    assert strategy.sharding_strategy.name == "SHARD_GRAD_OP"
    assert strategy.cpu_offload.offload_params


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"accumulate_grad_batches": 0}, ValueError, "`accumulate_grad_batches=0` is not possible"),
        ({"num_items": "tokens"}, ValueError, "is not a known counter"),
        ({"loss_reduction": "median"}, ValueError, "`loss_reduction='median'` is not known"),
        ({"grad_dtype": "int64"}, ValueError, "is no floating-point dtype"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        GACPFSDPStrategy(**settings)


class _Two(GACPFSDPStrategy):
    """On the first of two ranks that have the same batches, with the set-up of FSDP left out."""

    world_size = 2
    global_rank = 0

    def _sum_over_ranks(self, values: Any) -> Any:
        return [2 * value for value in values]


def test_its_ranks_are_all_ranks_and_its_gradients_are_views() -> None:
    strategy = _Two()
    assert (strategy._ranks, strategy._rank) == (2, 0)
    assert strategy.gradients_are_views()
    assert "flat shards" in strategy._cannot_carry


def test_a_mean_of_each_rank_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gacp.strategies.mixin.AccumulationMixin.setup", lambda *_: None)
    with pytest.raises(MisconfigurationException, match="`average_across_ranks=False` does not work with"):
        _Two(average_across_ranks=False).setup(None)  # type: ignore[arg-type]


def test_a_micro_batch_without_items_sends_zeros_through_the_modules_children() -> None:
    """Where its loss is NaN: every parameter gets a gradient, as the collectives of a backward need, of zeros."""
    module = Automatic()
    strategy = _Two()
    children: list[Tensor] = []
    handle = module.net.register_forward_hook(lambda _, __, output: children.append(output))
    loss = module.loss(module.net, ragged_batches([0])[0])
    handle.remove()
    strategy._outputs = children
    assert loss.isnan()
    strategy._backward_without_items(loss, None)
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))
    assert not strategy._outputs
