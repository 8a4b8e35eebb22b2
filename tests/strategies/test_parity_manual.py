"""Manual optimization with cycles of 1 is Lightning's, whatever the module does; and DDP's is, on two ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_gacp import GACPDDPStrategy
from strategies.models import loader
from strategies.on_ranks import on_ranks
from strategies.parity import Small, assert_same, pairs, run
from strategies.test_parity import DictOutput, EverySchedule, OwnZeroGrad, compare, scaled


class Manual(Small):
    manual = True

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss)
        return loss


class ZeroesLast(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


class ClipsAndSchedules(Manual):
    def training_step(self, batch, batch_idx):
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad(set_to_none=False)
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        schedule.step()
        self.log("lr", schedule.get_last_lr()[0])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class TwoOptimizers(Manual):
    """A GAN's shape: toggled, and the second loss goes through both."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(self.loss(batch), retain_graph=True)
        first.step()
        self.untoggle_optimizer(first)
        second.zero_grad()
        self.manual_backward(self.loss(batch) * 2)
        second.step()

    def configure_optimizers(self):
        return self.sub_optimizers()


class Untoggled(TwoOptimizers):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class ByClosure(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class LBFGSByHand(ByClosure):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class AccumulatesByHand(Manual):
    """The recipe of Lightning's documentation."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch) / 2)
        if (batch_idx + 1) % 2 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


class StepsTwice(Manual):
    """A critic that is trained more often."""

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            self.optimizers().step()


class TwoBackwards(Manual):
    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.loss(batch) ** 2 * 0.01)
        self.optimizers().step()


class DirectBackward(Manual):
    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.loss(batch).backward()
        self.optimizers().step()


class RawOptimizer(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class NeverZeroes(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch) * 0.1)
        self.optimizers().step()


class StepsWithoutGradients(Manual):
    def training_step(self, batch, batch_idx):
        if batch_idx % 2:
            self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()


class SecondOrder(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        grads = torch.autograd.grad(loss, list(self.net.parameters()), create_graph=True)
        self.manual_backward(loss + 0.01 * sum(g.square().sum() for g in grads))
        optimizer.step()


class StepsInBatchEnd(Manual):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.optimizers().step()
        self.optimizers().zero_grad()


class Nothing(Manual):
    def training_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))


MANUAL = [
    *(Manual, ZeroesLast, ClipsAndSchedules, TwoOptimizers, Untoggled, ByClosure, LBFGSByHand, AccumulatesByHand),
    *(StepsTwice, TwoBackwards, DirectBackward, RawOptimizer, NeverZeroes, StepsWithoutGradients, SecondOrder),
    *(StepsInBatchEnd, Nothing),
]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Found .* module.s. in eval mode:UserWarning")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("module", MANUAL)
def test_what_a_module_may_do_by_hand(module):
    compare(module, val_data=lambda: loader(pairs(2)), val_check_interval=2)


@pytest.mark.parametrize("module", [Manual, ByClosure, TwoBackwards])
def test_scaled(module):
    """Several steps of a scaled run overflow, and are skipped by both alike."""
    compare(module, plugins=scaled)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor:UserWarning")
@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument:UserWarning")
def test_dataloader_iter():
    class OverIterator(Manual):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            self.optimizers().zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.optimizers().step()
            self.log("loss", loss, batch_size=4)

    compare(OverIterator)


# ---------------------------------------------------------------- two ranks

DDP_MODULES: list[Any] = [
    *(Small, DictOutput, EverySchedule, OwnZeroGrad, Manual, ClipsAndSchedules, TwoBackwards, AccumulatesByHand),
    *(TwoOptimizers, ByClosure),
]


def data_of(rank: int) -> Any:
    return loader([(x + rank, y - rank) for x, y in pairs()])


def train_both(rank: int, indices: list[int], kwargs: dict[str, Any]) -> int:
    warnings.filterwarnings("ignore", message="It is recommended to use .*sync_dist=True")
    for index in indices:
        # with two optimizers some parameters get no gradient in a backward
        extra = {"find_unused_parameters": True} if DDP_MODULES[index] is TwoOptimizers else {}
        theirs, ours = (
            run(
                DDP_MODULES[index],
                lambda: data_of(rank),
                make(**extra, **kwargs),
                devices=2,
                use_distributed_sampler=False,
            )
            for make in (DDPStrategy, GACPDDPStrategy)
        )
        assert theirs.steps > 0, DDP_MODULES[index]
        assert_same(theirs, ours)
    return len(indices)


@pytest.mark.parametrize(
    "kwargs", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=["plain", "static", "views"]
)
def test_two_ranks(kwargs):
    indices = list(range(len(DDP_MODULES) if not kwargs else 5))
    assert on_ranks(train_both, indices, kwargs) == [len(indices)] * 2
