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

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_gacp.accumulation.cycle import LossReduction
from lightning_gacp.strategies.advice import say_what_batch_norm_sees, say_what_changes_nothing
from lightning_gacp.strategies.fetching import CountingIterator, fetches_itself
from lightning_gacp.strategies.gates import NothingToStep
from lightning_gacp.strategies.grad_dtype import accumulate_in, cast_to_own
from lightning_gacp.strategies.schedulers import follow_schedulers_again
from lightning_gacp.strategies.set_up import TOTAL, SetUp
from lightning_gacp.strategies.settings import Settings

_NOTHING = nullcontext()


class AccumulationMixin(SetUp):
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
        skip_non_finite: Whether a cycle in which a loss or a gradient is infinite or NaN, on any rank, is skipped on
            all ranks: no step, no move of a learning-rate schedule, and one warning. It asks the device once a cycle.
            With a gradient scaler only losses are looked at: infinite gradients are what the scaler skips itself.
        **kwargs: For the Lightning strategy underneath.

    Attributes:
        cycle_result: The last finished cycle, for loggers; ``None`` before the first.
        lost_micro_batches: Micro-batches that were run and never stepped with, in this fit.
        skipped_cycles: Cycles that ``skip_non_finite`` has skipped, in this fit.
    """

    def __init__(
        self,
        accumulate_grad_batches: int | dict[int, int] | None = None,
        num_items: str | Callable[[Any], Any] | None = "auto",
        loss_reduction: LossReduction | None = None,
        average_across_ranks: bool = True,
        free_gradients: bool = True,
        grad_dtype: torch.dtype | str | None = None,
        skip_non_finite: bool = False,
        **kwargs: Any,
    ) -> None:
        self.settings = Settings.checked(
            accumulate_grad_batches,
            num_items,
            loss_reduction,
            average_across_ranks,
            free_gradients,
            grad_dtype,
            skip_non_finite,
        )
        self._open_books()
        super().__init__(**kwargs)

    def on_train_start(self) -> None:
        """Begins a run of the fit loop with clean books, whatever an earlier run left."""
        self._forget()
        self._cycles = self.lost_micro_batches = self.skipped_cycles = 0
        self._skips_backward = False
        self._skipped_last, self._skipped_in_a_row = -1, 0
        if self._trainer.fit_loop.restarted_mid_epoch:
            self._follow_schedule()
            follow_schedulers_again(self._trainer)
        self._restore_cycle()
        super().on_train_start()
        self._said_batch_norm = False
        say_what_changes_nothing(self.settings, self._trainer, self._ranks, getattr(self, "defer_gradient_sync", False))

    def on_train_end(self) -> None:
        """Says what an early end has left undone."""
        super().on_train_end()
        self._check_regular()
        if self._scaling is not None:
            self._scaling.finish()
        if self._cycle.open:
            self._discard("training ended inside a cycle")

    def on_exception(self, exception: BaseException) -> None:
        """Says what is lost with the cycle that was interrupted, unless a checkpoint has just carried it away."""
        super().on_exception(exception)
        carried = self._carried == (self._cycles, self._cycle.micro_batches)
        running = self._cycle.closed and not self._finished and not self._has_stepped and not self._alone
        refused = isinstance(exception, MisconfigurationException)
        if self._fitting and not refused and (running or (self._cycle.open and not carried)):
            with warnings.catch_warnings():
                warnings.simplefilter("always")  # as an error it would take the place of the exception
                self._discard(f"`{type(exception).__name__}` interrupted the cycle")

    # ---------------------------------------------------------------- one micro-batch

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Counts the items of a train batch, then moves it to the device."""
        if self._count is not None and self._training:
            self._counted = self._count.attempt(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Ends what is over: the last cycle and its gradients."""
        super().on_train_batch_start(batch, batch_idx)
        trainer = self._trainer
        self._skips_backward = trainer.fit_loop._skip_backward
        if self._skips_backward:
            self._current = None
            return
        ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if ready == 1:
            self._follow_schedule()
            self._gate_schedulers()  # stochastic weight averaging puts one of its own in when an epoch starts
            if not self._said_batch_norm and trainer.accumulate_grad_batches > 1:
                self._said_batch_norm = True
                say_what_batch_norm_sees(trainer)
        if self._scaling is not None:
            self._scaling.finish()
        cycle = self._cycle
        if cycle.closed:
            self._check_regular()
            self._check_leaks()
            self._finish_cycle()
            self._start_cycle()
        elif cycle.micro_batches > 0 and (ready - 1) % trainer.accumulate_grad_batches == 0:
            # At 1 an epoch begins; elsewhere its last micro-batch was skipped (`None`), or its closure never called.
            self._discard(
                f"{'the epoch ended' if ready == 1 else 'nothing was trained on at its end, and so it ended'}"
                " inside a cycle"
            )
        if cycle.micro_batches == 0:
            self._release_gradients()
        for gate in self._gates:
            gate.start_micro_batch()
        self._current = None
        # Until a `training_step` has run: a hook may skip the batch, and no scheduler moves then.
        self._step_skipped = True

    def _follow_schedule(self) -> None:
        length = self.settings.length_at(self._trainer.current_epoch)
        if length is not None and self._trainer.accumulate_grad_batches == self._schedule_value != length:
            self._trainer.accumulate_grad_batches = self._schedule_value = length

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's step as one micro-batch of the cycle."""
        if self._skips_backward:
            return super().training_step(*args, **kwargs)
        current = self._begin_micro_batch(self._trainer)
        if self._wants_total:
            assert self._look_ahead is not None
            if self._cycle.micro_batches == 0:
                items = self._look_ahead.total_of_next_cycle()
                across = self.settings.average_across_ranks
                self._total_of_cycle = float(self._sum_over_ranks([items])[0]) if across else items
            kwargs[TOTAL] = self._total_of_cycle
        if fetches_itself(args):
            current.items, current.fetches = None, True
            args = (CountingIterator(args[0], self._note_fetched), *args[1:])
        output = super().training_step(*args, **kwargs)
        if current.manual:
            self._settle(has_loss=False)
            if current.last:
                self._finish_cycle()
                if self._scaling is not None:
                    self._scaling.finish()
            return output
        if current.fetches:
            self._keep_from_zeroing()
        if output is None:
            self._settle(has_loss=False)
        elif not isinstance(output, Tensor) and isinstance(output, Mapping) and output.get("num_items") is not None:
            current.handed_over = float(output["num_items"])
        return output

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
        current, module = self._current, self._lightning_module
        if current is None or module is None or not self._training:
            if self.skips_steps():
                return closure_loss.detach()
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if current.fetches:
            self._give_back_kept()
        weight = self._settle(num_items).weight
        for gate in self._gates:
            gate.note_backward()
        loss = closure_loss
        with self._synced(current.last) if current.manual else _NOTHING:
            if weight == 0:
                self._backward_without_items(closure_loss, optimizer)
                return closure_loss.detach()
            # The lines of Lightning's `Strategy.backward`, with the weight put in after the hooks that look at the
            # loss.
            self.pre_backward(closure_loss)
            plugin = self.precision_plugin
            closure_loss = plugin.pre_backward(closure_loss, module)
            unscaled = closure_loss is loss
            weighted = closure_loss if weight == 1.0 else closure_loss * weight
            plugin.backward(weighted, module, optimizer, *args, **kwargs)
            closure_loss = plugin.post_backward(closure_loss, module)
            self.post_backward(closure_loss)
        if current.handed_over:
            items = current.handed_over if self._cycle.loss_reduction == "mean" else 1.0
            # What Lightning has divided is its own tensor, and the plugin has detached it. The module's own loss, in
            # manual optimization, may change at any time.
            self._running_loss.add(
                closure_loss if unscaled else loss, items * current.divided_by, keep=not current.manual
            )
        return closure_loss

    # ---------------------------------------------------------------- the step

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Steps at the end of a cycle; a cycle without items steps on no rank, runs no hook and moves no schedule."""
        trainer = self._trainer
        if self._skips_backward and not self._active:
            # The averaged weights stay as they are: Lightning would step with the gradients that are left over.
            closure()
            self._uncount_step()
            return None
        gate = self._gate_of(optimizer)

        def checked() -> Any:
            result = closure()
            self._give_back_kept()
            if not self._manual:
                if not self.ready_to_step(gate):
                    raise NothingToStep
                if result is None and self._cycle.items > 0:
                    # The last micro-batch gave no loss. The precision plugin reads `None` as "no gradients": there
                    # are some.
                    result = torch.zeros((), device=self.root_device)
                elif result is None and trainer.accumulate_grad_batches > 1:
                    # Nor did any other: no step, so no move of the schedule. (In cycles of 1 Lightning makes both.)
                    self._step_skipped = True
                    raise NothingToStep
            if gate is not None and self.settings.grad_dtype is not None:
                cast_to_own(gate.parameters)
            return result

        if self._scaling is not None:
            self._scaling.before_step(optimizer)
        if gate is not None:
            gate.stepped_for_real = False
            gate._inside = True
        try:
            output = super().optimizer_step(optimizer, checked, model, **kwargs)
            if gate is not None:
                scaled = getattr(self.precision_plugin, "scaler", None) is not None
                gate.skipped = scaled and not gate.stepped_for_real
            self._step_skipped = gate is not None and all(each.skipped is not False for each in self._gates)
        except NothingToStep:
            for other in () if self._manual else self._gates:
                for parameter in other.parameters:
                    parameter.grad = None
            self._uncount_step()
            output = None
        finally:
            if gate is not None:
                gate._inside = False
                gate.note_step()
                if self.settings.grad_dtype is not None:
                    accumulate_in(gate.parameters, self.settings.grad_dtype)
        if not self._manual:
            self._finish_cycle()
        return output
