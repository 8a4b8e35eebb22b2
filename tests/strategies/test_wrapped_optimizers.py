"""Optimizers that wrap others, and Lightning's wrapper made by the module itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

import lightning_gacp  # noqa: F401 - it registers the strategies
from tests.strategies.models import BoringEitherWay, quiet_trainer


class HalfSteps(Optimizer):
    """Lets the optimizer inside step with half of the gradients."""

    def __init__(self, inside: Optimizer) -> None:
        self._optimizer = inside
        self.calls = 0
        super().__init__(inside.param_groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        output = None if closure is None else closure()
        self.calls += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        self._optimizer.step()
        return output


class Halved(BoringEitherWay):
    def configure_optimizers(self) -> Any:
        self.optimizer = HalfSteps(SGD(self.parameters(), lr=0.1))
        return self.optimizer


def _trained(model: BoringModel, strategy: str, **settings: Any) -> Tensor:
    torch.manual_seed(1)
    torch.nn.init.ones_(model.layer.weight)
    torch.nn.init.zeros_(model.layer.bias)
    quiet_trainer(strategy=strategy, limit_train_batches=4, limit_val_batches=0, **settings).fit(model)
    return model.layer.weight.detach().clone()


@pytest.mark.parametrize(("plain", "strategy"), [("auto", "gacp"), ("ddp", "gacp_ddp")])
@pytest.mark.parametrize("automatic", [True, False])
def test_optimizer_that_wraps_another_makes_its_own_step(automatic: bool, plain: str, strategy: str) -> None:
    theirs, ours = Halved(automatic), Halved(automatic)
    assert torch.equal(_trained(theirs, plain), _trained(ours, strategy))
    assert theirs.optimizer.calls == ours.optimizer.calls == 4


@pytest.mark.parametrize("automatic", [True, False])
def test_optimizer_that_wraps_another_steps_once_a_cycle(automatic: bool) -> None:
    model, reference = Halved(automatic), Halved(True)
    ours = _trained(model, "gacp", accumulate_grad_batches=2)
    torch.testing.assert_close(ours, _trained(reference, "auto", accumulate_grad_batches=2))
    assert model.optimizer.calls == reference.optimizer.calls == 2


class Counting(LightningOptimizer):
    """Lightning's wrapper with a line of the user's."""

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure, **kwargs)


class WrapsItself(BoringModel):
    def configure_optimizers(self) -> Any:
        self.wrapped: Any = Counting(SGD(self.parameters(), lr=0.1))
        return [self.wrapped], [{"scheduler": StepLR(self.wrapped, 2), "interval": "step"}]


def test_wrapper_of_the_module_is_the_one_that_steps() -> None:
    """torch's schedulers mark the ``step`` of the object that they are given, and warn where it is never called."""
    model = WrapsItself()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Detected call of")
        ours = _trained(model, "gacp")
    assert model.optimizers() is model.wrapped
    assert model.wrapped.steps == 4
    assert torch.equal(ours, _trained(WrapsItself(), "auto"))
