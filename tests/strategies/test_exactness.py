"""One device: the step of a cycle is the step of one big batch, however the batch is cut."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_gacp import GACPStrategy
from tests.strategies.models import (
    Automatic,
    Manual,
    big_batch_gradients,
    count,
    loader,
    loss_of,
    make_net,
    masked_mean,
    quiet_trainer,
    ragged_batches,
    reference_run,
    relative_error,
)

LENGTHS = [12, 2, 7, 1, 5, 9, 3, 8, 4, 6]
MODULES = [
    pytest.param(Automatic, {}, id="automatic"),
    pytest.param(Manual, {}, id="manual"),
    pytest.param(Manual, {"trailing": True}, id="manual-zero_grad-last"),
]


def check_run(module: Automatic, batches: list[dict[str, Tensor]], cycle: int, epochs: int = 1) -> None:
    """Every gradient that an optimizer step saw, and the final weights, are those of plain SGD over big batches."""
    dtype = module.net[1].weight.dtype
    gradients, net = reference_run(batches, cycle, epochs, module.lr, dtype)
    bound = 1e-12 if dtype == torch.float64 else 1e-6
    assert len(module.seen) == len(gradients)
    for found, expected in zip(module.seen, gradients, strict=True):
        assert relative_error(found, expected) < bound
    assert relative_error(list(module.net.parameters()), list(net.parameters())) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cycle", [1, 2, 3, 7])
@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_cycle_equals_one_big_batch(cls: type[Automatic], kwargs: dict[str, Any], cycle: int, dtype: Any) -> None:
    """Ragged token counts, two epochs of 10 micro-batches: 3 and 7 leave a short last cycle."""
    batches = ragged_batches(LENGTHS)
    module = cls(dtype=dtype, **kwargs)
    trainer = quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=cycle, num_items="labels"), max_epochs=2)
    trainer.fit(module, loader(batches))
    check_run(module, batches, cycle, epochs=2)
    assert trainer.global_step == 2 * -(-len(LENGTHS) // cycle)


def test_lightning_itself_is_wrong_on_the_same_data() -> None:
    """The error that the package exists for; were it to vanish, these tests would prove nothing."""
    batches = ragged_batches(LENGTHS)
    module = Automatic(lr=0.0)
    quiet_trainer(accumulate_grad_batches=7).fit(module, loader(batches))
    expected = big_batch_gradients(make_net(), batches[:7])
    assert relative_error(module.seen[0], expected) > 0.1
    # and its short last cycle of 3 is divided by 7
    short = big_batch_gradients(make_net(), batches[7:])
    assert relative_error(module.seen[1], short) > 0.5


def test_cycles_of_the_trainers_own_setting() -> None:
    """``Trainer(accumulate_grad_batches)`` is taken where the strategy says nothing."""
    batches = ragged_batches(LENGTHS)
    module = Automatic()
    quiet_trainer(strategy=GACPStrategy(num_items="labels"), accumulate_grad_batches=3).fit(module, loader(batches))
    check_run(module, batches, 3)


class _Stream(IterableDataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_unsized_loader(cls: type[Automatic], kwargs: dict[str, Any]) -> None:
    """The last cycle of a loader without a length is short, exact, and does not reach into the next epoch."""
    batches = ragged_batches(LENGTHS)
    module = cls(**kwargs)
    strategy = GACPStrategy(accumulate_grad_batches=4, num_items="labels")
    data = torch.utils.data.DataLoader(_Stream(batches), batch_size=None)
    quiet_trainer(strategy=strategy, max_epochs=2).fit(module, data)
    check_run(module, batches, 4, epochs=2)


@pytest.mark.parametrize("limit", [7, 0.7])
@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_limit_train_batches(cls: type[Automatic], kwargs: dict[str, Any], limit: float) -> None:
    batches = ragged_batches(LENGTHS)
    module = cls(**kwargs)
    strategy = GACPStrategy(accumulate_grad_batches=4, num_items="labels")
    quiet_trainer(strategy=strategy, limit_train_batches=limit).fit(module, loader(batches))
    check_run(module, batches[:7], 4)


class _Validates:
    """Validation steps that run a forward, as modules do; and a backward of their own, as some do."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.enable_grad():
            loss_of(make_net(self.net[1].weight.dtype), batch).backward()


@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_validation_inside_a_cycle(cls: type[Automatic], kwargs: dict[str, Any]) -> None:
    """Lightning zeroes the gradients before a validation in manual optimization: not inside a cycle of ours."""
    batches = ragged_batches(LENGTHS)

    class Module(_Validates, cls):  # type: ignore[valid-type,misc]
        pass

    module = Module(**kwargs)
    strategy = GACPStrategy(accumulate_grad_batches=4, num_items="labels")
    trainer = quiet_trainer(strategy=strategy, val_check_interval=1, num_sanity_val_steps=1)
    trainer.fit(module, loader(batches), loader(batches[:2]))
    check_run(module, batches, 4)


@pytest.mark.parametrize("loss", [loss_of, masked_mean])
@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_micro_batches_without_items(cls: type[Automatic], kwargs: dict[str, Any], loss: Any) -> None:
    """First, middle, last of a cycle: their loss is 0/0 = NaN, and neither it nor its gradient gets in anywhere."""
    batches = ragged_batches([0, 5, 3, 4, 0, 6, 2, 7, 0])
    module = cls(loss=loss, **kwargs)
    strategy = GACPStrategy(accumulate_grad_batches=3, num_items="labels")
    quiet_trainer(strategy=strategy, detect_anomaly=True).fit(module, loader(batches))
    check_run(module, batches, 3)


@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_cycle_without_items(cls: type[Automatic], kwargs: dict[str, Any]) -> None:
    """No step, no hook before a step, no LR step, one warning; the cycles around it are as if it had not been."""
    batches = ragged_batches([5, 3, 0, 0, 4, 6])
    schedule: list[int] = []

    class Module(cls):  # type: ignore[valid-type,misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule.append(step) or 1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if not self.automatic_optimization:
                self.lr_schedulers().step()
            return loss

    module = Module(loss=masked_mean, **kwargs)
    trainer = quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=2, num_items="labels"))
    with pytest.warns(UserWarning, match="A cycle of 2 micro-batches had no items at all") as caught:
        trainer.fit(module, loader(batches))
    assert sum("had no items at all" in str(warning.message) for warning in caught) == 1
    check_run(module, batches, 2)
    assert schedule == [0, 1, 2]  # 0 at construction, then one for each of the two real steps
    assert trainer.global_step == 2


@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_sum_reduction(cls: type[Automatic], kwargs: dict[str, Any]) -> None:
    batches = ragged_batches(LENGTHS)
    module = cls(loss=lambda net, batch: loss_of(net, batch, "sum"), **kwargs)
    strategy = GACPStrategy(accumulate_grad_batches=3, num_items="labels", loss_reduction="sum")
    quiet_trainer(strategy=strategy).fit(module, loader(batches))
    check_run(module, batches, 3)


class _AutomaticTotal(Automatic):
    def training_step(self, batch: Any, batch_idx: int, num_items_in_batch: float) -> Any:
        self.totals = [*getattr(self, "totals", []), num_items_in_batch]
        return loss_of(self.net, batch, "sum") / num_items_in_batch


class _ManualTotal(Manual):
    def training_step(self, batch: Any, batch_idx: int, num_items_in_batch: float) -> Any:
        self.loss = lambda net, batch: loss_of(net, batch, "sum") / num_items_in_batch
        self.totals = [*getattr(self, "totals", []), num_items_in_batch]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("cls", [_AutomaticTotal, _ManualTotal])
def test_training_step_that_takes_the_items_of_the_cycle(cls: type[Any]) -> None:
    """``num_items_in_batch`` is known before the first forward, in every micro-batch, up to the short last cycle."""
    batches = ragged_batches(LENGTHS)
    module = cls()
    quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=4, num_items="labels"), max_epochs=2).fit(
        module, loader(batches)
    )
    expected = [count(batches[start : start + 4]) for start in (0, 4, 8) for _ in batches[start : start + 4]]
    assert module.totals == expected * 2
    check_run(module, batches, 4, epochs=2)


@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_no_counting_is_the_mean_of_the_losses_over_the_actual_length(
    cls: type[Automatic], kwargs: dict[str, Any]
) -> None:
    """``num_items=None``: equal weights; the short last cycle is divided by 1, not by 3."""
    batches = ragged_batches([12, 2, 7, 1])
    module = cls(lr=0.0, **kwargs)
    quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=3, num_items=None)).fit(module, loader(batches))
    each = [big_batch_gradients(make_net(), [batch]) for batch in batches]
    mean = [torch.stack(grads).mean(0) for grads in zip(*each[:3], strict=True)]
    assert relative_error(module.seen[0], mean) < 1e-6
    assert relative_error(module.seen[1], each[3]) < 1e-6


@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_loss_of_the_cycle_is_per_item(cls: type[Automatic], kwargs: dict[str, Any]) -> None:
    batches = ragged_batches(LENGTHS)
    module = cls(lr=0.0, **kwargs)
    strategy = GACPStrategy(accumulate_grad_batches=4, num_items="labels")
    quiet_trainer(strategy=strategy).fit(module, loader(batches))
    result = strategy.cycle_result
    assert result is not None and result.loss is not None
    last = batches[8:]
    with torch.no_grad():
        expected = sum(float(loss_of(module.net, batch, "sum")) for batch in last) / count(last)
    assert float(result.loss) == pytest.approx(expected, rel=1e-6)
    assert (result.index, result.micro_batches, result.num_items, result.total_items) == (2, 2, 10, 10)
    assert result.stepped


class _ClipsFirst(Manual):
    """Clips what the last step has left, before anything new has come."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clip_gradients(self.optimizers(), gradient_clip_val=1e-6)
        return super().training_step(batch, batch_idx)


def test_clipping_before_the_backward_loses_nothing() -> None:
    batches = ragged_batches(LENGTHS)
    module = _ClipsFirst()
    quiet_trainer(strategy=GACPStrategy(4, num_items="labels")).fit(module, loader(batches))
    check_run(module, batches, 4)


class _Stepwise(Manual):
    """Looks at the weights after every micro-batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.weights = [*getattr(self, "weights", []), self.net[1].weight.detach().clone()]


def test_weights_move_only_at_the_end_of_a_cycle() -> None:
    module = _Stepwise()
    strategy = GACPStrategy(accumulate_grad_batches=3, num_items="labels")
    quiet_trainer(strategy=strategy).fit(module, loader(ragged_batches(LENGTHS)))
    moved = [not torch.equal(a, b) for a, b in zip(module.weights, module.weights[1:], strict=False)]
    assert moved == [False, True, False, False, True, False, False, True, True]


@pytest.mark.parametrize(("cls", "kwargs"), MODULES)
def test_second_fit_on_the_same_trainer(cls: type[Automatic], kwargs: dict[str, Any]) -> None:
    """Teardown gives the Trainer its own value back; without that Lightning refuses the second fit in manual mode."""
    batches = ragged_batches(LENGTHS)
    trainer = quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=3, num_items="labels"))
    trainer.fit(cls(**kwargs), loader(batches))
    assert trainer.accumulate_grad_batches == 1
    trainer.fit_loop.epoch_progress.reset()
    module = cls(**kwargs)
    trainer.fit(module, loader(batches))
    check_run(module, batches, 3)


def test_steps_are_planned_in_optimizer_steps() -> None:
    """``estimated_stepping_batches`` is right already in ``configure_optimizers``, in manual optimization too."""

    class Module(Manual):
        def configure_optimizers(self) -> Any:
            self.planned = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = Module()
    trainer = quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=3, num_items="labels"), max_epochs=2)
    trainer.fit(module, loader(ragged_batches(LENGTHS)))
    assert module.planned == trainer.global_step == 8


def test_nothing_is_multiplied_in_cycles_of_one() -> None:
    """A drop-in for Lightning's own strategy: the same weights to the last bit."""
    batches = ragged_batches(LENGTHS)
    ours, theirs = Automatic(), Automatic()
    quiet_trainer(strategy=GACPStrategy(num_items="labels")).fit(ours, loader(batches))
    quiet_trainer().fit(theirs, loader(batches))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("length", [2, 3, 7])
def test_equal_counts_are_lightnings_own_accumulation(length: int) -> None:
    """Where all micro-batches have as many items, and no cycle is short, Lightning is right: the same to the bit."""
    batches = ragged_batches([6] * (3 * length))
    ours, theirs = Automatic(), Automatic()
    quiet_trainer(strategy=GACPStrategy(length, num_items="labels")).fit(ours, loader(batches))
    quiet_trainer(accumulate_grad_batches=length).fit(theirs, loader(batches))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_fit_is_silent_but_for_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted is said once; nothing is warned about."""
    strategy = GACPStrategy(accumulate_grad_batches=3, num_items="labels")
    said: list[str] = []
    monkeypatch.setattr("lightning_gacp.strategies.counting.rank_zero_info", said.append)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(cycle|micro-batch|num_items).*")
        quiet_trainer(strategy=strategy, max_epochs=2).fit(Automatic(), loader(ragged_batches(LENGTHS)))
    assert said == ["GACPStrategy: cycles of 3 micro-batches, weighted by Targets(key='labels', ignore_index=-100)"]
    assert strategy.counting == "Targets(key='labels', ignore_index=-100)"
