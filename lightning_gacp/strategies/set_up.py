"""How a fit begins and ends for the strategy: what it tells the Trainer, the gates it puts up and takes down again."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import LBFGS, Optimizer

from lightning_gacp.accumulation.cycle import AccumulationCycle, LossReduction
from lightning_gacp.strategies.advice import (
    say_that_nothing_prescales,
    say_what_stays_idle,
)
from lightning_gacp.strategies.checkpoint import CycleCheckpoints
from lightning_gacp.strategies.counting import ItemCount
from lightning_gacp.strategies.gates import GACPOptimizer, OptimizerGate
from lightning_gacp.strategies.grad_dtype import accumulate_in, accumulate_in_own
from lightning_gacp.strategies.lookahead import LookAhead, is_stateful, shortest
from lightning_gacp.strategies.scaling import ManualScaling
from lightning_gacp.strategies.schedulers import gate_scheduler, release_scheduler
from lightning_gacp.strategies.unwrapped import unwrapped

TOTAL = "num_items_in_batch"


class SetUp(CycleCheckpoints):
    """Puts the strategy into a fit, and takes it out again."""

    def _open_books(self) -> None:
        super()._open_books()
        self._look_ahead: LookAhead | None = None
        self._wants_total = False
        self._scaling: ManualScaling | None = None
        self._hooks: list[Any] = []
        self._gated_schedulers: list[Any] = []
        self._trainers_value: int | None = None  # what to put back at teardown
        self._hidden_value: int | None = None  # what Lightning's check must not see
        self._schedule_value = 0  # what our own schedule has set

    def connect(self, model: LightningModule) -> None:
        """Hides the Trainer's length of a cycle in manual optimization, until Lightning's check of it has passed."""
        super().connect(model)
        trainer = getattr(model, "_trainer", None)  # a stand-in for a module may lack it
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING and not model.automatic_optimization:
            self._hidden_value, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, 1

    def _show_hidden_value(self) -> None:
        if self._hidden_value is not None:
            self._trainer.accumulate_grad_batches, self._hidden_value = self._hidden_value, None

    def setup_environment(self) -> None:
        """Tells the Trainer the length of a cycle.

        Here, because it is after Lightning's check that refuses accumulation in manual optimization, and before the
        first hooks that ask for ``estimated_stepping_batches``.
        """
        super().setup_environment()
        self._show_hidden_value()
        length = self.settings.first_length
        if not self._fitting or length is None:
            return
        trainer = self._trainer
        theirs = trainer.accumulate_grad_batches
        if theirs not in (1, length):
            raise MisconfigurationException(
                f"`Trainer(accumulate_grad_batches={theirs})` and `{type(self).__name__}(accumulate_grad_batches="
                f"{self.settings.accumulate_grad_batches})` contradict each other. Set one of them."
            )
        self._trainers_value = theirs
        trainer.accumulate_grad_batches = self._schedule_value = length

    def setup(self, trainer: Trainer) -> None:
        """Sets the strategy up, then puts the gates on optimizers, schedulers, clipping and scaling."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        assert self.lightning_module is not None
        self._wants_total = names_argument(self.lightning_module.training_step, TOTAL)
        if self._reduction == "prescaled" and not self._wants_total:
            say_that_nothing_prescales(TOTAL)
        self._cycle = AccumulationCycle(
            self._reduction, self._ranks, self._sum_over_ranks, self.settings.average_across_ranks
        )
        self._count = ItemCount(self.settings.counter, self.lightning_module)
        self._frees = self.settings.free_gradients and not _reads_gradients_late(trainer, self.lightning_module)
        self._remove_gates()
        for gate in self._gates:
            self._refuse_closures_that_run_again(gate.optimizer)
            if isinstance(gate.optimizer, Optimizer):
                if self._manual:
                    self._hooks.append(gate.optimizer.register_step_pre_hook(gate.check_raw_step))
                self._hooks.append(gate.optimizer.register_step_post_hook(gate.note_real_step))
        self._gate_schedulers()
        if self._manual:
            say_what_stays_idle(trainer)
            self._scaling = ManualScaling(self.precision_plugin, self._before_clipping)
        if self.settings.grad_dtype is not None:
            for gate in self._gates:
                accumulate_in(gate.parameters, self.settings.grad_dtype)

    def _gate_schedulers(self) -> None:
        this = weakref.proxy(self)
        for config in self.lr_scheduler_configs:
            interval, optimizer = config.interval, getattr(config.scheduler, "optimizer", None)

            def may_step(interval: str = interval, optimizer: Any = optimizer) -> bool:
                return bool(this._scheduler_may_step(interval, optimizer))

            if gate_scheduler(config.scheduler, may_step):
                self._gated_schedulers.append(config.scheduler)

    @property
    def counting(self) -> str:
        """What is counted, in words; empty before the first micro-batch."""
        return "" if self._count is None else self._count.described

    @property
    def _reduction(self) -> LossReduction:
        return self.settings.loss_reduction or ("prescaled" if self._wants_total else "mean")

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, as the module returned them."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        raw = [unwrapped(optimizer) for optimizer in optimizers]
        known = {id(gate.optimizer): gate for gate in self._gates}
        self._optimizers = optimizers
        view = weakref.proxy(self)
        self._gates = [known.get(id(optimizer)) or OptimizerGate(optimizer, view) for optimizer in raw]
        wrapped = []
        for gate, returned in zip(self._gates, optimizers, strict=True):
            optimizer: Any = returned
            if self._manual or not isinstance(returned, LightningOptimizer):
                optimizer = GACPOptimizer(gate.optimizer, gate if self._manual else None)
            wrapped.append(GACPOptimizer._to_lightning_optimizer(optimizer, self))
        self._lightning_optimizers = wrapped

    def _refuse_closures_that_run_again(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LBFGS) and self._trainer.accumulate_grad_batches > 1:
            raise MisconfigurationException(
                "`LBFGS` evaluates its closure several times a step, and a cycle of"
                f" {self._trainer.accumulate_grad_batches} micro-batches cannot be run again. Set"
                " `accumulate_grad_batches=1`, or take another optimizer."
            )

    @property
    def _schedules(self) -> bool:
        return isinstance(self.settings.accumulate_grad_batches, dict)

    def process_dataloader(self, dataloader: object) -> object:
        """Puts the look-ahead on the train loader, where something needs it (see ``lookahead.py``)."""
        dataloader = super().process_dataloader(dataloader)
        if not self._fitting or not self._trainer.training:
            return dataloader
        trainer = self._trainer
        length, ranks = sized_len(dataloader), self._ranks
        if ranks > 1:
            length = shortest(dataloader, trainer, self._rank, ranks, self._sum_over_ranks)
        sum_over_ranks = self._sum_over_ranks if ranks > 1 and length is None else None
        if not names_argument(trainer.lightning_module.training_step, TOTAL):
            may_be_ahead = length is None or trainer.accumulate_grad_batches > 1 or self._schedules
            if sum_over_ranks or length != sized_len(dataloader) or (is_stateful(dataloader) and may_be_ahead):
                return LookAhead(dataloader, None, trainer, sum_over_ranks, ranks, length)
            return dataloader
        if names_argument(trainer.lightning_module.training_step, "dataloader_iter"):
            raise MisconfigurationException(
                f"`training_step` asks for `dataloader_iter` and for `{TOTAL}`: the items of a cycle are known ahead"
                " only where Lightning fetches the batches. Take `batch, batch_idx` instead, or hand the count over"
                " with the loss."
            )
        if self._look_ahead is not None and not self._look_ahead.started:
            raise MisconfigurationException(
                f"`training_step` asks for `{TOTAL}`, and there are several train loaders: whose items? Combine them"
                " into one loader, or hand the count over with the loss."
            )
        assert self._count is not None
        self._look_ahead = LookAhead(dataloader, self._count, trainer, sum_over_ranks, ranks, length)
        return self._look_ahead

    def teardown(self) -> None:
        """Takes every gate off again and gives the Trainer its own value back."""
        self._forget()
        self._to_restore = self._carried = None
        self._remove_gates()
        for scheduler in self._gated_schedulers:
            release_scheduler(scheduler)
        self._gated_schedulers.clear()
        if self._scaling is not None:
            self._scaling.remove()
            self._scaling = None
        if self.settings.grad_dtype is not None:
            for gate in self._gates:
                accumulate_in_own(gate.parameters)
        self._show_hidden_value()  # where the check has failed
        if self._trainers_value is not None:
            self._trainer.accumulate_grad_batches = self._trainers_value
            self._trainers_value = None
        self._current = None
        self._look_ahead = None
        super().teardown()

    def _remove_gates(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def names_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _reads_gradients_late(trainer: Trainer, module: LightningModule) -> bool:
    hook = "on_before_zero_grad"
    if is_overridden(hook, module) or is_overridden("optimizer_zero_grad", module):
        return True
    return any(is_overridden(hook, callback, parent=Callback) for callback in trainer.callbacks)  # type: ignore[attr-defined]
