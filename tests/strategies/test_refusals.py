"""What cannot be right is refused, with what was set, what was found and what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_gacp import CausalLMTargets, GACPStrategy, Samples, Targets
from tests.strategies.models import Automatic, Manual, loader, quiet_trainer, ragged_batches

BATCHES = ragged_batches([4, 5, 3, 6])


def fit(module: Any, batches: Any = None, **kwargs: Any) -> Any:
    strategy = GACPStrategy(**{"accumulate_grad_batches": 2, "num_items": "labels", **kwargs})
    trainer = quiet_trainer(strategy=strategy)
    trainer.fit(module, loader(BATCHES if batches is None else batches))
    return trainer


@pytest.mark.parametrize("value", [0, -3, {0: 2, 3: 0}])
def test_cycle_shorter_than_one(value: Any) -> None:
    with pytest.raises(ValueError, match=r"`accumulate_grad_batches=.*` is not possible: a cycle has at least 1"):
        GACPStrategy(accumulate_grad_batches=value)


@pytest.mark.parametrize("value", [2.0, True, "4", {0: 1.5}, {"a": 2}])
def test_cycle_length_of_the_wrong_type(value: Any) -> None:
    with pytest.raises(TypeError, match=r"`accumulate_grad_batches` holds .* write an `int`"):
        GACPStrategy(accumulate_grad_batches=value)


def test_schedule_without_or_before_the_first_epoch() -> None:
    with pytest.raises(ValueError, match="has no epoch in it"):
        GACPStrategy(accumulate_grad_batches={})
    with pytest.raises(ValueError, match="epochs count from 0"):
        GACPStrategy(accumulate_grad_batches={-1: 2})


@pytest.mark.parametrize("name", ["tokens", "no_such_package.count", "torch.no_such_function"])
def test_unknown_counter(name: str) -> None:
    with pytest.raises(ValueError, match=r"`num_items='.*'` is not a known counter: write one of 'auto', 'causal_lm'"):
        GACPStrategy(num_items=name)


def test_counter_that_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="`num_items=3` cannot be called"):
        GACPStrategy(num_items=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["average_across_ranks", "free_gradients", "skip_non_finite"])
def test_word_where_a_flag_is_meant(name: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}='no'` is no `bool`: write `{name}=True` or `{name}=False`"):
        GACPStrategy(**{name: "no"})


def test_losses_that_nothing_has_divided() -> None:
    """A `training_step` that is not told the items of its cycle can hardly have divided by them."""
    trainer = quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=2, loss_reduction="prescaled"))
    with pytest.raises(UserWarning, match="`training_step` has no argument `num_items_in_batch`"):
        trainer.fit(Automatic(), loader(ragged_batches([4, 5])))


def test_counter_that_gives_no_number() -> None:
    trainer = quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=2, num_items=lambda batch: None))
    with pytest.raises(TypeError, match="gave `None` for a batch: return the number of items"):
        trainer.fit(Automatic(), loader(ragged_batches([4, 5])))


def test_unknown_reduction_and_dtype() -> None:
    with pytest.raises(ValueError, match="`loss_reduction='average'` is not known"):
        GACPStrategy(loss_reduction="average")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`grad_dtype='float33'` is no dtype of torch"):
        GACPStrategy(grad_dtype="float33")
    with pytest.raises(ValueError, match="is no floating-point dtype"):
        GACPStrategy(grad_dtype=torch.int32)


@pytest.mark.parametrize(
    ("num_items", "batches", "found"),
    [
        (
            "labels",
            [{"inputs": torch.ones(2, 3)}],
            r"under `'labels'` and found none in a `dict` with the keys \['inputs'\]",
        ),
        ("causal_lm", [torch.ones(2, 3)], "found none in a `Tensor`"),
        (Targets(key=1), [(torch.ones(2, 3),)], r"under `1` and found none in a `(list|tuple)` of 1: \[Tensor\]"),
        (CausalLMTargets(key="y"), [{"labels": torch.ones(2, 3)}], "looked for labels under `'y'`"),
        (Samples(), [{"text": "abc"}], "counts the first dimension of a tensor of the batch, and found none"),
    ],
)
def test_counter_that_does_not_find_what_it_counts(num_items: Any, batches: Any, found: str) -> None:
    module = Automatic(loss=lambda net, batch: net[1].weight.sum())
    with pytest.raises(ValueError, match=found):
        fit(module, batches, num_items=num_items)


def test_contradiction_with_the_trainer() -> None:
    trainer = quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=2), accumulate_grad_batches=3)
    with pytest.raises(
        MisconfigurationException, match=r"`Trainer\(accumulate_grad_batches=3\)` and `GACPStrategy\(accum"
    ):
        trainer.fit(Automatic(), loader(BATCHES))
    assert trainer.accumulate_grad_batches == 3


def test_agreement_with_the_trainer() -> None:
    trainer = quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=2, num_items=None), accumulate_grad_batches=2)
    trainer.fit(Automatic(), loader(BATCHES))
    assert trainer.global_step == 2


def test_lbfgs() -> None:
    class Module(Automatic):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(MisconfigurationException, match="`LBFGS` evaluates its closure several times a step"):
        fit(Module())


def test_optimizer_that_evaluates_its_closure_twice() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            return super().step(closure)

    class Module(Automatic):
        def configure_optimizers(self) -> Any:
            return Twice(self.parameters(), lr=0.1)

    with pytest.raises(MisconfigurationException, match="evaluates its closure several times a step"):
        fit(Module())


def test_step_of_the_raw_optimizer() -> None:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=False)
            self.manual_backward(self.loss(self.net, batch))
            optimizer.step()

    with pytest.raises(MisconfigurationException, match="on the raw optimizer, past the strategy"):
        fit(Module())
    fit(Module(), accumulate_grad_batches=1)  # cycles of one: as in Lightning


def test_optimizer_stepped_twice_in_one_training_step() -> None:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                self.manual_backward(self.loss(self.net, batch))
                optimizer.step()

    with pytest.raises(MisconfigurationException, match="was called twice in one `training_step`"):
        fit(Module())
    assert fit(Module(), accumulate_grad_batches=1).global_step == 8


class _OwnAccumulation(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(self.net, batch) / 2)
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


def test_module_that_accumulates_by_itself() -> None:
    with pytest.raises(MisconfigurationException, match=r"called on 1 of 2 micro-batches of a cycle"):
        fit(_OwnAccumulation())


def test_module_that_accumulates_by_itself_in_cycles_of_one() -> None:
    """Untouched: its gradients live on from batch to batch, its steps are its own."""
    ours, theirs = _OwnAccumulation(), _OwnAccumulation()
    fit(ours, accumulate_grad_batches=1)
    quiet_trainer().fit(theirs, loader(BATCHES))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_optimizers_at_two_frequencies() -> None:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(self.loss(self.net, batch))
            first.step()
            if batch_idx % 2 == 0:
                second.step()

        def configure_optimizers(self) -> Any:
            halves = list(self.net.parameters())
            return [torch.optim.SGD(halves[:2], lr=0.1), torch.optim.SGD(halves[2:], lr=0.1)]

    with pytest.raises(MisconfigurationException, match="train at different frequencies"):
        fit(Module())


@pytest.mark.parametrize("between", [False, True])
def test_optimizers_with_parameters_in_common(between: bool) -> None:
    """One backward cannot be kept for both; where each step has a backward of its own, each has its gradients."""

    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            first.zero_grad()
            if not between:
                second.zero_grad()
            self.manual_backward(self.loss(self.net, batch))
            first.step()
            if between:
                second.zero_grad()
                self.manual_backward(self.loss(self.net, batch))
            second.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[2:].parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.05)]

    if between:
        assert fit(Module()).global_step == 4
    else:
        with pytest.raises(MisconfigurationException, match="another optimizer with parameters in common"):
            fit(Module())
        assert fit(Module(), accumulate_grad_batches=1).global_step == 8


def test_two_losses_with_different_counts() -> None:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for count in (3, 4):
                self.manual_backward(self.loss(self.net, batch), num_items=count)

    with pytest.raises(MisconfigurationException, match="came with different counts, 3 and 4"):
        fit(Module())


def test_zero_grad_between_backward_and_step() -> None:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(self.net, batch))
            optimizer.zero_grad()
            self.manual_backward(self.loss(self.net, batch))
            optimizer.step()

    with pytest.raises(MisconfigurationException, match="was called between a `manual_backward` and its `step"):
        fit(Module())


def test_zero_grad_between_clipping_and_step() -> None:
    """To be clipped, the gradients of the whole cycle are in ``.grad``: zeroed there, they would be lost."""

    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(self.net, batch))
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            if batch_idx == 1:
                optimizer.zero_grad()
            optimizer.step()

    with pytest.raises(MisconfigurationException, match="was called between a `manual_backward` and its `step"):
        fit(Module())


def test_backward_that_goes_round_the_strategy() -> None:
    """``loss.backward()`` has no weight of the cycle: said, not stepped with."""

    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.loss(self.net, batch).backward()
            optimizer.step()

    with pytest.raises(MisconfigurationException, match=r"without a `self.manual_backward\(loss\)`"):
        fit(Module())


def test_items_of_several_train_loaders() -> None:
    class Module(Automatic):
        def training_step(self, batch: Any, batch_idx: int, num_items_in_batch: float) -> Any:
            return None

    trainer = quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=2, num_items="labels"))
    with pytest.raises(MisconfigurationException, match="there are several train loaders: whose items"):
        trainer.fit(Module(), {"a": loader(BATCHES), "b": loader(BATCHES)})


def test_trainer_is_left_as_it_was_after_an_error() -> None:
    """Every swap and shadow is undone after an exception, and the next fit is right."""

    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise KeyError("in the middle of a cycle")
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
            return [self.optimizer], [self.scheduler]

    module = Module()
    trainer = quiet_trainer(strategy=GACPStrategy(accumulate_grad_batches=3, num_items="labels"))
    with pytest.raises(KeyError):
        trainer.fit(module, loader(BATCHES))
    assert trainer.accumulate_grad_batches == 1
    assert type(module.scheduler) is torch.optim.lr_scheduler.StepLR
    assert not module.optimizer._optimizer_step_pre_hooks and not module.optimizer._optimizer_step_post_hooks
    assert "clip_gradients" not in vars(trainer.precision_plugin)
