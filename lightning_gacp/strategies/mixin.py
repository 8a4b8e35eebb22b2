"""The mixin that puts exact accumulation cycles on a Lightning strategy.

How a micro-batch goes through it, in order:

1. ``batch_to_device``: the items are counted while the batch is on the host.
2. ``on_train_batch_start``: the last cycle, if it is over, is closed; its gradients are released.
3. ``training_step``: the micro-batch begins. Lightning's ``_should_accumulate`` says whether it is the last of its
   cycle; the answer is right from here on, not earlier.
4. ``backward``: the count enters the cycle, which answers with the weight of this loss and, at the end of a cycle,
   with the factor for what was gathered.
5. ``optimizer_step``: steps, unless the cycle had no items at all.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_gacp.accumulation.auto import EqualWeights, choose_counter
from lightning_gacp.accumulation.counters import Counter
from lightning_gacp.accumulation.cycle import AccumulationCycle, CycleResult, LossReduction, MicroBatch
from lightning_gacp.accumulation.gradients import scale_
from lightning_gacp.strategies.gates import GACPOptimizer, OptimizerGate
from lightning_gacp.strategies.lookahead import LookAhead, most_batches
from lightning_gacp.strategies.scaling import ManualScaling
from lightning_gacp.strategies.schedulers import gate_scheduler, release_scheduler
from lightning_gacp.strategies.settings import Settings

if TYPE_CHECKING:
    _Base = Strategy
else:
    _Base = object

# In these hooks a scheduler's `step` belongs to the micro-batch that runs; anywhere else (validation, end of an
# epoch) it does not.
_BATCH_HOOKS = frozenset(
    {
        "training_step",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "optimizer_step",
    }
)
_TOTAL = "num_items_in_batch"


class _NothingToStep(Exception):
    """Leaves the optimizer's step from inside its closure."""


class _Current:
    """The micro-batch that runs."""

    def __init__(self, ready: int, length: int, last: bool, items: float | Exception | None) -> None:
        self.ready = ready  # its number in the epoch, from 1
        self.length = length  # Lightning's cycle length
        self.last = last
        self.items = items
        self.step: MicroBatch | None = None  # once its count has entered the cycle
        self.handed_over: float | None = None


class AccumulationMixin(_Base):
    """Exact gradient accumulation for a Lightning strategy: ``class MyStrategy(AccumulationMixin, TheirStrategy)``.

    One optimizer step over any partition of a batch into micro-batches, over any number of ranks, equals the step
    over the whole batch, for losses that are means or sums over items. It cannot hold for what looks across a batch:
    in-batch contrastive losses, load balancing of experts, batch norm.

    Args:
        accumulate_grad_batches: Micro-batches between two optimizer steps; a dict gives the number from an epoch on,
            as in Lightning's ``GradientAccumulationScheduler``. ``None`` takes the Trainer's. Works in manual
            optimization too.
        num_items: What the loss averages over: ``causal_lm`` (labels after the shift by one), ``labels`` (all labels),
            ``samples``, a callable from the batch to a number (in YAML its import path, or a ``class_path``), or
            ``auto``, which counts tokens only where it can know that the loss is a mean over them. ``None``: every
            micro-batch weighs the same.
        loss_reduction: What ``training_step`` hands over: ``mean`` over the items, their ``sum``, or ``prescaled``,
            divided already by the ``num_items_in_batch`` that ``training_step`` takes as an argument. ``None`` means
            ``prescaled`` where ``training_step`` has that argument, else ``mean``.
        average_across_ranks: Whether the step is the mean over the items of all ranks. If false, every rank takes
            the mean over its own items.
        free_gradients: Whether gradients are released before the first forward of the next cycle, where memory peaks.
            They stay where a module or callback has an ``on_before_zero_grad`` hook, which may read them.
        grad_dtype: The dtype in which gradients are accumulated, e.g. ``float32`` under ``bf16-true``. ``None``:
            that of the parameters.
        **kwargs: For the Lightning strategy underneath.

    Attributes:
        cycle_result: The last finished cycle, for loggers; ``None`` before the first.
        counting: What is counted, in words; empty before the first micro-batch.
        lost_micro_batches: Micro-batches that were run and never stepped with, in this fit.
    """

    def __init__(
        self,
        accumulate_grad_batches: int | dict[int, int] | None = None,
        num_items: str | Callable[[Any], Any] | None = "auto",
        loss_reduction: LossReduction | None = None,
        average_across_ranks: bool = True,
        free_gradients: bool = True,
        grad_dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> None:
        self.settings = Settings.checked(
            accumulate_grad_batches, num_items, loss_reduction, average_across_ranks, free_gradients, grad_dtype
        )
        self._gates: list[OptimizerGate] = []
        self._cycle = AccumulationCycle()
        self._current: _Current | None = None
        self._counter: Counter | None = None
        self._counted: float | Exception | None = None
        self._look_ahead: LookAhead | None = None
        self._wants_total = False
        self._total_of_cycle = 0.0
        self._scaling: ManualScaling | None = None
        self._hooks: list[Any] = []
        self._trainers_value: int | None = None  # what to put back at teardown
        self._schedule_value = 0  # what our own schedule has set
        self._loss_sum: Tensor | None = None
        self._finished = False
        self._step_skipped = False
        self._frees = False
        self._factor_due = 1.0
        self.cycle_result: CycleResult | None = None
        self.counting = ""
        self.lost_micro_batches = 0
        super().__init__(**kwargs)

    # ---------------------------------------------------------------- what the parallel strategies override

    # Where gradients are out of reach until the last backward has reduced them, the closing factor waits for the step.
    _scales_after_last_backward = False

    @property
    def _ranks(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return 1

    def _sum_over_ranks(self, values: Any) -> Any:
        """Adds up a list of numbers over the ranks whose gradients are averaged, on the host."""
        return values

    def _synced(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a manual backward: holds reductions back until the last micro-batch."""
        return nullcontext()

    def _backward_without_items(self, loss: Tensor, optimizer: Optimizer | None) -> None:
        """Takes the place of a backward whose loss is over no items. Alone, there is nothing to do."""

    def gradients_are_views(self) -> bool:
        """Whether ``.grad`` may be a view of memory that others write."""
        return False

    # ---------------------------------------------------------------- set-up

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _manual(self) -> bool:
        return self.lightning_module is not None and not self.lightning_module.automatic_optimization

    def setup_environment(self) -> None:
        """Tells the Trainer the length of a cycle.

        Here, because it is after Lightning's check that refuses accumulation in manual optimization, and before the
        first hooks that ask for ``estimated_stepping_batches``.
        """
        super().setup_environment()
        trainer = self._trainer
        length = self.settings.first_length
        if trainer.state.fn != TrainerFn.FITTING or length is None:
            return
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
        self._wants_total = _names_argument(self.lightning_module.training_step, _TOTAL)
        self._cycle = AccumulationCycle(
            self._reduction, self._ranks, self._sum_over_ranks, self.settings.average_across_ranks
        )
        self._counter = EqualWeights() if self.settings.counter is None else None
        if callable(self.settings.counter):
            self._counter = self.settings.counter
        self._frees = self.settings.free_gradients and not _reads_gradients_late(trainer, self.lightning_module)
        self._remove_gates()
        for gate in self._gates:
            self._refuse_closures_that_run_again(gate.optimizer)
            if isinstance(gate.optimizer, Optimizer):
                self._hooks.append(gate.optimizer.register_step_pre_hook(gate.check_raw_step))
                self._hooks.append(gate.optimizer.register_step_post_hook(gate.note_real_step))
        this = weakref.proxy(self)
        for config in self.lr_scheduler_configs:
            interval = config.interval
            gate_scheduler(config.scheduler, lambda interval=interval: this._scheduler_may_step(interval))  # type: ignore[misc]
        if self._manual:
            self._scaling = ManualScaling(self.precision_plugin, self._before_clipping)
        if self.settings.grad_dtype is not None:
            self._set_grad_dtype(self.settings.grad_dtype)

    @property
    def _reduction(self) -> LossReduction:
        return self.settings.loss_reduction or ("prescaled" if self._wants_total else "mean")

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, as the module returned them."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        raw = [getattr(optimizer, "_optimizer", optimizer) for optimizer in optimizers]
        known = {id(gate.optimizer): gate for gate in self._gates}
        self._optimizers = optimizers
        view = weakref.proxy(self)
        self._gates = [known.get(id(optimizer)) or OptimizerGate(optimizer, view) for optimizer in raw]
        wrapped = []
        for gate in self._gates:
            optimizer = GACPOptimizer(gate.optimizer, gate if self._manual else None)
            wrapped.append(GACPOptimizer._to_lightning_optimizer(optimizer, self))
        self._lightning_optimizers = wrapped

    def _refuse_closures_that_run_again(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LBFGS) and self._trainer.accumulate_grad_batches > 1:
            raise MisconfigurationException(
                "`LBFGS` evaluates its closure several times a step, and a cycle of"
                f" {self._trainer.accumulate_grad_batches}"
                " micro-batches cannot be run again. Set `accumulate_grad_batches=1`, or take another optimizer."
            )

    def _set_grad_dtype(self, dtype: torch.dtype) -> None:
        for gate in self._gates:
            for parameter in gate.parameters:
                if parameter.requires_grad and parameter.is_floating_point():
                    parameter.grad = None
                    parameter.grad_dtype = dtype

    def process_dataloader(self, dataloader: object) -> object:
        """Puts the look-ahead on the train loader where ``training_step`` asks for the items of the whole cycle."""
        dataloader = super().process_dataloader(dataloader)
        trainer = self._trainer
        if not (trainer.training and _names_argument(trainer.lightning_module.training_step, _TOTAL)):
            return dataloader
        if self._look_ahead is not None and not self._look_ahead.started:
            raise MisconfigurationException(
                f"`training_step` asks for `{_TOTAL}`, and there are several train loaders: whose items? Combine"
                " them into"
                " one loader, or hand the count over with the loss."
            )
        self._look_ahead = LookAhead(dataloader, weakref.proxy(self))
        return self._look_ahead

    def on_train_start(self) -> None:
        """Begins a run of the fit loop with clean books, whatever an earlier run left."""
        self._forget()
        self.lost_micro_batches = 0
        super().on_train_start()

    def on_train_end(self) -> None:
        """Says what an early end has left undone."""
        super().on_train_end()
        self._check_regular()
        if self._scaling is not None:
            self._scaling.finish()
        if self._cycle.open:
            self._discard("training ended inside a cycle")

    def teardown(self) -> None:
        """Takes every gate off again and gives the Trainer its own value back."""
        self._remove_gates()
        for config in self.lr_scheduler_configs:
            release_scheduler(config.scheduler)
        if self._scaling is not None:
            self._scaling.remove()
            self._scaling = None
        if self.settings.grad_dtype is not None:
            for gate in self._gates:
                for parameter in gate.parameters:
                    parameter.grad = None
                    parameter.grad_dtype = parameter.dtype
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

    # ---------------------------------------------------------------- one micro-batch

    @property
    def _active(self) -> bool:
        """Whether a micro-batch of training runs (stochastic weight averaging runs some without a backward)."""
        return self._current is not None and self._trainer.training

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Counts the items of a train batch, then moves it to the device."""
        module = self.lightning_module
        if module is not None and module._trainer is not None and self._trainer.training:
            self._counted = self._count(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def _count(self, batch: Any) -> float | Exception:
        """Counts, and keeps an error for when the count is needed: it may be handed over with the loss instead."""
        try:
            if self._counter is None:
                assert self.lightning_module is not None
                self._counter = choose_counter(self.lightning_module, batch)
            return float(self._counter(batch))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            return error

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Ends what is over: the last cycle and its gradients."""
        super().on_train_batch_start(batch, batch_idx)
        trainer = self._trainer
        if trainer.fit_loop._skip_backward:
            self._current = None
            return
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if ready == 1:
            self._follow_schedule()
        if self._scaling is not None:
            self._scaling.finish()
        if self._cycle.closed:
            self._check_regular()
            self._finish_cycle()
            self._start_cycle()
        elif self._cycle.open and (ready - 1) % trainer.accumulate_grad_batches == 0:
            self._discard("the epoch ended inside a cycle")
        if not self._cycle.open:
            self._release_gradients()
        for gate in self._gates:
            gate.start_micro_batch()
        self._current = None
        self._step_skipped = (
            True  # until a `training_step` has run: a hook may skip the batch, and no scheduler moves then
        )

    def _follow_schedule(self) -> None:
        length = self.settings.length_at(self._trainer.current_epoch)
        if length is not None and self._trainer.accumulate_grad_batches == self._schedule_value != length:
            self._trainer.accumulate_grad_batches = self._schedule_value = length

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's step as one micro-batch of the cycle."""
        trainer = self._trainer
        if trainer.fit_loop._skip_backward:
            return super().training_step(*args, **kwargs)
        self._begin_micro_batch(trainer)
        current = self._current
        assert current is not None
        if self._wants_total:
            assert self._look_ahead is not None
            if self._cycle.micro_batches == 0:
                self._total_of_cycle = self.total_over_ranks(self._look_ahead.total_of_next_cycle())
            kwargs[_TOTAL] = self._total_of_cycle
        output = super().training_step(*args, **kwargs)
        if self._manual:
            self._settle(has_loss=False)
            if current.last:
                self._finish_cycle()
                if self._scaling is not None:
                    self._scaling.finish()
        elif output is None:
            self._settle(has_loss=False)
        elif isinstance(output, Mapping) and output.get("num_items") is not None:
            current.handed_over = float(output["num_items"])
        return output

    def _begin_micro_batch(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop
        ready = loop.epoch_loop.batch_progress.current.ready
        length = trainer.accumulate_grad_batches
        if self._current is not None and self._current.ready == ready:
            if length > 1:
                raise MisconfigurationException(
                    "The optimizer evaluates its closure several times a step, and a cycle of several"
                    " micro-batches cannot be"
                    " run again. Set `accumulate_grad_batches=1`, or take another optimizer."
                )
            self._start_cycle()
        self._step_skipped = False
        self._current = _Current(ready, length, not loop._should_accumulate(), self._counted)

    def _settle(self, num_items: float | None = None, has_loss: bool = True) -> MicroBatch:
        """Enters the micro-batch into the cycle at its first loss, and scales the gradients gathered before it."""
        current = self._current
        assert current is not None
        num_items = current.handed_over if num_items is None else num_items
        if current.step is None:
            items = current.items if num_items is None else float(num_items)
            if not has_loss:
                items = 0.0
            if isinstance(items, Exception):
                raise items
            if items is None:
                raise MisconfigurationException(
                    "The items of this micro-batch could not be counted before its forward. Hand the count over"
                    " with the loss:"
                    ' `self.manual_backward(loss, num_items=n)`, or return `{"loss": loss, "num_items": n}`.'
                )
            if has_loss and not self.counting:
                self._announce(handed_over=num_items is not None)
            current.handed_over = items
            step = self._cycle.add(items, current.last, has_loss)
            if self._scales_after_last_backward:
                self._factor_due = step.factor
                step = MicroBatch(step.weight / step.factor)
            else:
                self._scale_gathered(step.factor)
            current.step = step
        elif num_items is not None and float(num_items) != current.handed_over:
            raise MisconfigurationException(
                f"Two losses of one `training_step` came with different counts, {current.handed_over:g} and"
                f" {float(num_items):g}"
                " items, and a micro-batch has one weight. Give both the same count, or add the losses up before"
                " one backward."
            )
        return current.step

    def _announce(self, handed_over: bool) -> None:
        if handed_over:
            self.counting = "items that come with the loss"
        else:
            assert self._counter is not None
            self.counting = repr(self._counter)
            if (
                isinstance(self._counter, EqualWeights)
                and self._counter.advice
                and self._trainer.accumulate_grad_batches > 1
            ):
                rank_zero_warn(self._counter.advice)
        rank_zero_info(
            f"{type(self).__name__}: cycles of {self._trainer.accumulate_grad_batches} micro-batches, weighted by"
            f" {self.counting}"
        )

    def _scale_gathered(self, factor: float) -> None:
        if factor == 1.0:
            return
        # Through a dict: a parameter of two optimizers is scaled once.
        parameters = dict.fromkeys(parameter for gate in self._gates for parameter in gate.parameters)
        aside = [gradient for gate in self._gates for gradient in gate.aside.tensors()]
        scale_([*(parameter.grad for parameter in parameters), *aside], factor)

    def backward(
        self,
        closure_loss: Tensor,
        optimizer: Optimizer | None,
        *args: Any,
        num_items: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Runs the backward of a micro-batch's loss, weighted for the cycle.

        Args:
            closure_loss: The loss. In automatic optimization Lightning has divided it by the cycle's length.
            optimizer: The optimizer, in automatic optimization.
            *args: For ``Tensor.backward``.
            num_items: Items of this loss, where the count is known only after the forward:
                ``self.manual_backward(loss, num_items=n)``.
            **kwargs: For ``Tensor.backward``.
        """
        if not self._active:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self._current is not None and self.lightning_module is not None
        step = self._settle(num_items)
        for gate in self._gates:
            gate.note_backward()
        weight = step.weight
        self._add_to_loss(closure_loss)
        if not self._manual:
            weight *= self._current.length
        with self._synced(self._current.last) if self._manual else nullcontext():
            if weight == 0:
                self._backward_without_items(closure_loss, optimizer)
                return closure_loss.detach()
            # The lines of Lightning's `Strategy.backward`, with the weight put in after the hooks that look at the
            # loss.
            self.pre_backward(closure_loss)
            plugin, module = self.precision_plugin, self.lightning_module
            closure_loss = plugin.pre_backward(closure_loss, module)
            weighted = closure_loss if weight == 1.0 else closure_loss * weight
            plugin.backward(weighted, module, optimizer, *args, **kwargs)
            closure_loss = plugin.post_backward(closure_loss, module)
            self.post_backward(closure_loss)
        return closure_loss

    def _add_to_loss(self, loss: Tensor) -> None:
        current = self._current
        assert current is not None
        if not current.handed_over or loss.numel() != 1:
            return
        if self._loss_sum is None or self._loss_sum.device != loss.device:
            dtype = torch.float64 if loss.dtype == torch.float64 else torch.float32
            self._loss_sum = torch.zeros((), dtype=dtype, device=loss.device)
        alpha = current.handed_over if self._cycle.loss_reduction == "mean" else 1.0
        self._loss_sum.add_(loss.detach().reshape(()), alpha=alpha if self._manual else alpha * current.length)

    # ---------------------------------------------------------------- the step

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Steps at the end of a cycle; a cycle without items steps on no rank, runs no hook and moves no schedule."""
        if not self._active and self._trainer.fit_loop._skip_backward:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        gate = next((gate for gate in self._gates if gate.optimizer is optimizer), None)

        def checked() -> Any:
            result = closure()
            if not self._manual:
                if not self.ready_to_step():
                    raise _NothingToStep
                if result is None and self._cycle.items > 0:
                    # The last micro-batch gave no loss. The precision plugin reads `None` as "no gradients": there
                    # are some.
                    result = torch.zeros((), device=self.root_device)
            self._give_gradients_their_dtype(optimizer)
            return result

        if self._scaling is not None:
            self._scaling.before_step(optimizer)
        if gate is not None:
            gate.stepped_for_real = False
            gate._inside = True
        try:
            output = super().optimizer_step(optimizer, checked, model, **kwargs)
            self._step_skipped = (
                gate is not None
                and not gate.stepped_for_real
                and getattr(self.precision_plugin, "scaler", None) is not None
            )
        except _NothingToStep:
            for other in self._gates:
                for parameter in other.parameters:
                    parameter.grad = None
            output = None
        finally:
            if gate is not None:
                gate._inside = False
            self._take_gradient_dtype_back(optimizer)
        if not self._manual:
            self._finish_cycle()
        return output

    def ready_to_step(self) -> bool:
        """Brings the gradients of a closing cycle to their final value; whether there is anything to step with."""
        current = self._current
        if current is None or not current.last:
            return True
        self._settle(has_loss=False)
        factor, self._factor_due = self._factor_due, 1.0
        self._scale_gathered(factor)
        if not self._cycle.empty:
            return True
        if not self._step_skipped:
            self._step_skipped = True
            rank_zero_warn(
                f"A cycle of {self._cycle.micro_batches} micro-batches had no items at all (no target that its"
                " loss averages"
                " over): it was skipped, without a step of the optimizer or the learning-rate schedule."
            )
        return False

    def _give_gradients_their_dtype(self, optimizer: Optimizer) -> None:
        """Casts accumulated gradients for the optimizer, whose own state has the parameter's dtype."""
        if self.settings.grad_dtype is None:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and gradient.dtype != parameter.dtype:
                    parameter.grad = None
                    parameter.grad_dtype = parameter.dtype
                    parameter.grad = gradient.to(parameter.dtype)

    def _take_gradient_dtype_back(self, optimizer: Optimizer) -> None:
        if self.settings.grad_dtype is None:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad_dtype != self.settings.grad_dtype:
                    parameter.grad = None
                    parameter.grad_dtype = self.settings.grad_dtype

    # ---------------------------------------------------------------- what the gates ask

    def gates_steps(self) -> bool:
        """Whether a step of the module's belongs to a cycle of more than one micro-batch."""
        return self._manual and self._active and self._current is not None and self._current.length > 1

    def closes_cycle(self) -> bool:
        """Whether the micro-batch that runs is the last one of its cycle."""
        return self._current is not None and self._current.last

    def has_one_optimizer(self) -> bool:
        """Whether no other optimizer's loss can leave gradients in an optimizer's parameters."""
        return len(self._gates) == 1

    def _before_clipping(self, optimizer: Optimizer) -> bool:
        if not self.gates_steps():
            return True
        if not self.closes_cycle():
            return False
        gate = next((gate for gate in self._gates if gate.optimizer is optimizer), None)
        return gate is None or gate.complete()

    def _scheduler_may_step(self, interval: str) -> bool:
        if not self._trainer.training:
            return True
        assert self.lightning_module is not None
        if not self._manual:
            return interval != "step" or not self._step_skipped
        if self.lightning_module._current_fx_name not in _BATCH_HOOKS or self._current is None:
            return True
        return self._current.last and not self._step_skipped

    # ---------------------------------------------------------------- what the look-ahead asks

    def count_now(self, batch: Any) -> float:
        """Items of a batch on the host."""
        counted = self._count(batch)
        if isinstance(counted, Exception):
            raise counted
        return counted

    def total_over_ranks(self, items: float) -> float:
        """Items of a cycle that the step averages over."""
        return float(self._sum_over_ranks([items])[0]) if self.settings.average_across_ranks else items

    def batches_until_step(self, position: int) -> int:
        """Micro-batches from ``position`` in the epoch up to the end of its cycle."""
        length = self._trainer.accumulate_grad_batches
        return length - position % length

    def position_in_epoch(self) -> int:
        """Micro-batches of this epoch that a restarted run was trained on already."""
        return self._trainer.fit_loop.epoch_loop.batch_progress.current.ready

    def most_batches(self, length: int | None) -> float:
        """Micro-batches that the Trainer takes of an epoch at most."""
        return most_batches(self._trainer, length)

    # ---------------------------------------------------------------- ends of cycles

    def _finish_cycle(self) -> None:
        """Publishes the result of a closed cycle, once."""
        if self._finished or not self._cycle.closed:
            return
        self._finished = True
        cycle = self._cycle
        loss = None
        if self._loss_sum is not None and cycle.items > 0:
            if cycle.loss_reduction != "prescaled":
                loss = self._loss_sum / cycle.items
            else:
                total = cycle.total_items if cycle.average_across_ranks else cycle.items
                loss = self._loss_sum * (total / cycle.items)
        self.cycle_result = CycleResult(
            index=0 if self.cycle_result is None else self.cycle_result.index + 1,
            micro_batches=cycle.micro_batches,
            num_items=cycle.items,
            total_items=cycle.total_items,
            stepped=not self._step_skipped,
            loss=loss,
        )

    def _start_cycle(self) -> None:
        self._cycle.reset()
        self._finished = False
        self._current = None
        if self._loss_sum is not None:
            self._loss_sum.zero_()
        for gate in self._gates:
            gate.start_cycle()
            gate.aside.clear()

    def _release_gradients(self) -> None:
        if not self._frees:
            return
        for gate in self._gates:
            if not self._manual or gate.can_release():
                for parameter in gate.parameters:
                    parameter.grad = None

    def _check_regular(self) -> None:
        for gate in self._gates if self._manual else ():
            if gate.irregular() and self._trainer.accumulate_grad_batches > 1:
                raise MisconfigurationException(gate.irregular_message())

    def _discard(self, why: str) -> None:
        lost = self._cycle.micro_batches
        self.lost_micro_batches += lost
        rank_zero_warn(
            f"{lost} micro-batches were lost: {why}. Their gradients are discarded; no step was taken with them."
        )
        self._forget()

    def _forget(self) -> None:
        """Drops an open cycle with its gradients."""
        was_open = self._cycle.open
        self._start_cycle()
        if was_open:
            for gate in self._gates:
                for parameter in gate.parameters:
                    parameter.grad = None


def _names_argument(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _reads_gradients_late(trainer: Trainer, module: LightningModule) -> bool:
    hook = "on_before_zero_grad"
    if is_overridden(hook, module) or is_overridden("optimizer_zero_grad", module):
        return True
    return any(is_overridden(hook, callback, parent=Callback) for callback in trainer.callbacks)  # type: ignore[attr-defined]
