"""fp16 with a gradient scaler: one unscaling an optimizer and cycle, one update a cycle, clipping on true gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_gacp import GACPStrategy
from tests.strategies.models import (
    Automatic,
    Manual,
    big_batch_gradients,
    loader,
    loss_of,
    make_net,
    quiet_trainer,
    ragged_batches,
    reference_run,
    relative_error,
)

MODULES = [Automatic, Manual]


class _Fp32UnderScaler(MixedPrecision):
    """The scaler without the half precision: what it does to gradients can then be checked to float32's rounding."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        super().__init__("16-mixed", "cpu", scaler)

    def autocast_context_manager(self) -> Any:
        return torch.autocast("cpu", enabled=False)


def make_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, **kwargs)


@pytest.mark.parametrize("cls", MODULES)
def test_gradient_before_the_step_is_the_big_batch_gradient(cls: type[Automatic]) -> None:
    batches = ragged_batches([12, 2, 7, 1, 5])
    module = cls(lr=0.0)
    scaler = make_scaler()
    strategy = GACPStrategy(accumulate_grad_batches=3, num_items="labels")
    quiet_trainer(strategy=strategy, plugins=[_Fp32UnderScaler(scaler)]).fit(module, loader(batches))
    assert relative_error(module.seen[0], big_batch_gradients(make_net(), batches[:3])) < 1e-6
    assert relative_error(module.seen[1], big_batch_gradients(make_net(), batches[3:])) < 1e-6


class _Clips(Manual):
    """Clips where Lightning's documentation says to: between the backward and the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.net, batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        optimizer.step()


@pytest.mark.parametrize("cycle", [1, 3])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("cls", [Automatic, _Clips])
def test_clipping_acts_once_on_the_complete_unscaled_gradient(cls: type[Automatic], scaled: bool, cycle: int) -> None:
    """The update has the norm ``lr * clip``; clipped while scaled by 1024 it would be a thousandth of that."""
    batches = ragged_batches([12, 2, 7])
    module = cls(lr=1.0)
    before = [p.detach().clone() for p in module.net.parameters()]
    plugins = [_Fp32UnderScaler(make_scaler())] if scaled else []
    clip = {"gradient_clip_val": 0.01} if cls is Automatic else {}
    strategy = GACPStrategy(accumulate_grad_batches=cycle, num_items="labels")
    quiet_trainer(strategy=strategy, plugins=plugins, limit_train_batches=cycle, **clip).fit(module, loader(batches))
    update = [a - b.detach() for a, b in zip(before, module.net.parameters(), strict=True)]
    norm = float(torch.cat([u.flatten() for u in update]).norm())
    assert norm == pytest.approx(0.01, rel=1e-4)
    expected = big_batch_gradients(make_net(), batches[:cycle])
    total = torch.cat([g.flatten() for g in expected]).norm()
    assert relative_error(update, [g * (0.01 / total) for g in expected]) < 1e-4


class _Overflows(Automatic):
    """The second cycle's gradient overflows; a schedule moves with every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = loss_of(self.net, batch)
        return loss * float("inf") if batch_idx == 3 else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class _ManualOverflows(_Overflows):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.lr_schedulers().step()


@pytest.mark.parametrize("cls", [_Overflows, _ManualOverflows])
def test_skipped_step_moves_no_schedule(cls: type[Automatic]) -> None:
    """Three cycles of two, the second overflows: two LR steps, the scale is halved once, weights stay finite."""
    module = cls(lr=0.1)
    scaler = make_scaler(growth_interval=1000)
    strategy = GACPStrategy(accumulate_grad_batches=2, num_items="labels")
    trainer = quiet_trainer(strategy=strategy, plugins=[_Fp32UnderScaler(scaler)])
    trainer.fit(module, loader(ragged_batches([4, 5, 3, 6, 2, 7])))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
    assert scaler.get_scale() == 2.0**9
    assert all(torch.isfinite(p).all() for p in module.parameters())


class _Two(Manual):
    """Two optimizers over one net; the first one's step makes a scaler without care change the second one's scale."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(self.loss(self.net, batch))
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        halves = list(self.net.parameters())
        return [torch.optim.SGD(halves[:2], lr=self.lr), torch.optim.SGD(halves[2:], lr=self.lr)]


class _TwoSchedules(Manual):
    """Two nets; the loss of one of them overflows once. Schedules move after each step, or at the end."""

    def __init__(self, overflows: int, at_end: bool) -> None:
        super().__init__()
        self.nets = nn.ModuleList([self.net, make_net()])
        self.overflows, self.at_end = overflows, at_end

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> None:
        schedules = self.lr_schedulers()
        for i, (optimizer, net) in enumerate(zip(self.optimizers(), self.nets, strict=True)):
            optimizer.zero_grad()
            factor = float("inf") if batch_idx == 3 and i == self.overflows else 1.0
            self.manual_backward(self.loss(net, batch) * factor)
            optimizer.step()
            if not self.at_end:
                schedules[i].step()
        for schedule in schedules if self.at_end else ():
            schedule.step()

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.nets]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]


@pytest.mark.parametrize("cycle", [1, 2])
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("overflows", [0, 1])
def test_skipped_step_of_one_optimizer_moves_the_schedule_of_the_other(
    overflows: int, at_end: bool, cycle: int
) -> None:
    """Each schedule moves as often as its own optimizer has stepped, whatever has become of the other one's step."""
    module = _TwoSchedules(overflows, at_end)
    scaler = make_scaler(growth_interval=1000)
    strategy = GACPStrategy(accumulate_grad_batches=cycle, num_items="labels")
    trainer = quiet_trainer(strategy=strategy, plugins=[_Fp32UnderScaler(scaler)])
    trainer.fit(module, loader(ragged_batches([4, 5, 3, 6, 2, 7])))
    moves = [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs]
    assert moves == [6 // cycle - (i == overflows) for i in range(2)]


@pytest.mark.parametrize("cycle", [1, 2])
def test_one_scaler_update_a_cycle(cycle: int) -> None:
    """With the scale growing at every update, both optimizers of a cycle must unscale by the scale of its losses."""
    batches = ragged_batches([4, 5, 3, 6])
    module = _Two(lr=0.1)
    module.on_before_optimizer_step = lambda optimizer: None  # type: ignore[method-assign]
    scaler = make_scaler(growth_interval=1)
    strategy = GACPStrategy(accumulate_grad_batches=cycle, num_items="labels")
    quiet_trainer(strategy=strategy, plugins=[_Fp32UnderScaler(scaler)]).fit(module, loader(batches))
    assert scaler.get_scale() == 2.0**10 * 2 ** (4 // cycle)
    _, net = reference_run(batches, cycle)
    assert relative_error(list(module.net.parameters()), list(net.parameters())) < 1e-6
    assert "update" not in vars(scaler) and "unscale_" not in vars(scaler)


@pytest.mark.parametrize("cls", MODULES)
def test_no_overflow_at_the_default_scale(cls: type[Automatic]) -> None:
    """A sum over 4096 targets times the default scale is infinite in fp16; the weights of a cycle keep it near 1."""
    batches = ragged_batches([4096, 4096, 1024], rows=8)
    module = cls(lr=0.1)
    strategy = GACPStrategy(accumulate_grad_batches=3, num_items="labels")
    scaler = torch.amp.GradScaler("cpu")
    trainer = quiet_trainer(strategy=strategy, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    trainer.fit(module, loader(batches))
    assert scaler.get_scale() == 65536.0  # no step was skipped
    expected = big_batch_gradients(make_net(), batches)
    assert relative_error(module.seen[0], expected) < 5e-3


class _NoneLast(Automatic):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("scaled", [False, True])
def test_none_in_the_last_micro_batch_does_not_drop_the_cycle(scaled: bool) -> None:
    """Its items do not count; what was gathered is stepped with, under a scaler too."""
    batches = ragged_batches([4, 5, 3])
    module = _NoneLast(lr=0.1)
    plugins = [_Fp32UnderScaler(make_scaler())] if scaled else []
    strategy = GACPStrategy(accumulate_grad_batches=3, num_items="labels")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`training_step` returned `None`")  # Lightning's, once a process
        quiet_trainer(strategy=strategy, plugins=plugins).fit(module, loader(batches))
    expected = big_batch_gradients(make_net(), batches[:2])
    assert relative_error(module.seen[0], expected) < 1e-6
    moved: list[Tensor] = [
        a - b.detach() for a, b in zip(make_net().parameters(), module.net.parameters(), strict=True)
    ]
    assert relative_error(moved, [0.1 * g for g in expected]) < 1e-5
