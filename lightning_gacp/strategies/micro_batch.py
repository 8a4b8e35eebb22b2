"""One micro-batch: its count enters the cycle, gradients are brought to scale, and the gates ask where it stands."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_gacp.accumulation.cycle import MicroBatch
from lightning_gacp.accumulation.gradients import scale_
from lightning_gacp.strategies.books import Current, CycleBooks
from lightning_gacp.strategies.finite import all_finite
from lightning_gacp.strategies.gates import OptimizerGate
from lightning_gacp.strategies.unwrapped import unwrapped

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


# So many cycles in a row without finite gradients are no accident of the data.
_HOPELESS = 100


class MicroBatches(CycleBooks):
    """Takes micro-batches into the cycle."""

    def _begin_micro_batch(self, trainer: Trainer) -> Current:
        loop = trainer.fit_loop
        ready = loop.epoch_loop.batch_progress.current.ready
        length = trainer.accumulate_grad_batches
        if self._current is not None and self._current.ready == ready:
            if length > 1:
                raise MisconfigurationException(
                    "The optimizer evaluates its closure several times a step, and a cycle of several micro-batches"
                    " cannot be run again. Set `accumulate_grad_batches=1`, or take another optimizer."
                )
            self._start_cycle()
        self._step_skipped = False
        current = Current(ready, length, not loop._should_accumulate(), self._counted, self._manual)
        self._current = current
        return current

    @property
    def _guesses(self) -> bool:
        """Whether nobody has said what to count."""
        return self.settings.counter == "auto"

    def _keep_from_zeroing(self) -> None:
        """Where the module fetches its batches, Lightning's index lags, and so gradients are zeroed inside a cycle."""
        if self._current is None or self._current.length == 1:
            return  # it zeroes them in every micro-batch, after the hooks that may read them
        for gate in self._gates:
            if self._cycle.open:
                gate.aside.take(gate.parameters, copy=self.gradients_are_views())
            else:
                for parameter in gate.parameters:
                    parameter.grad = None

    def _give_back_kept(self) -> None:
        if self._current is not None and self._current.fetches and not self._current.manual:
            for gate in self._gates:
                if gate.aside:
                    gate.aside.put_back(gate.parameters, add=True)

    def _note_fetched(self, batch: Any) -> None:
        """Counts a batch that the module fetched itself; a step over several of them has their items."""
        current = self._current
        assert current is not None and self._count is not None
        items = self._count.attempt(batch)
        if isinstance(current.items, float) and isinstance(items, float):
            items += current.items
        current.items = items

    def _settle(self, num_items: float | None = None, has_loss: bool = True) -> MicroBatch:
        """Enters the micro-batch into the cycle at its first loss, and scales the gradients gathered before it."""
        current = self._current
        assert current is not None
        if num_items is None:
            num_items = current.handed_over
        if current.step is None:
            items = 0.0
            if has_loss:
                counted = current.items if num_items is None else float(num_items)
                items = counted if isinstance(counted, float) else self._without_count(current)
                assert self._count is not None
                if not self._count.announced:
                    self._count.announce(type(self).__name__, current.length, handed_over=num_items is not None)
            current.handed_over = items
            current.has_loss = has_loss
            step = self._cycle.add(items, current.last, has_loss, current.divided_by)
            if self._scales_after_last_backward:
                self._factor_due = step.factor
                step = MicroBatch(step.weight / step.factor)
            elif step.factor != 1.0:
                self._scale_gathered(step.factor)
            current.step = step
        elif num_items is not None and float(num_items) != current.handed_over:
            raise MisconfigurationException(
                f"Two losses of one `training_step` came with different counts, {current.handed_over:g} and"
                f" {float(num_items):g} items, and a micro-batch has one weight. Give both the same count, or add the"
                " losses up before one backward."
            )
        return current.step

    def _without_count(self, current: Current) -> float:
        """The items of a micro-batch whose batch gave no count, where that is no matter."""
        if current.length == 1 and self._ranks == 1 and self._guesses:
            return 1.0  # nothing is weighted, so nothing needs to be known
        if isinstance(current.items, Exception):
            raise current.items
        raise MisconfigurationException(
            "The items of this micro-batch could not be counted before its forward. Hand the count over with"
            ' the loss: `self.manual_backward(loss, num_items=n)`, or return `{"loss": loss, "num_items": n}`.'
        )

    def _scale_gathered(self, factor: float) -> None:
        # Through a dict: a parameter of two optimizers is scaled once.
        parameters = dict.fromkeys(parameter for gate in self._gates for parameter in gate.parameters)
        aside = [gradient for gate in self._gates for gradient in gate.aside.tensors()]
        scale_([*(parameter.grad for parameter in parameters), *aside], factor)

    def ready_to_step(self, gate: OptimizerGate | None = None) -> bool:
        """Brings the gradients of a closing cycle to their final value; whether there is anything to step with.

        Args:
            gate: Whose optimizer is about to step, or to be clipped.
        """
        current = self._current
        if current is None or not current.last:
            return True
        if current.step is None:
            self._settle(has_loss=False)
        if self._factor_due != 1.0:
            factor, self._factor_due = self._factor_due, 1.0
            self._scale_gathered(factor)
        if not self._cycle.empty:
            return gate is None or not self.settings.skip_non_finite or not self._skips_non_finite(gate)
        if not self._step_skipped:
            self._step_skipped = True
            number = self._cycle.micro_batches
            rank_zero_warn(
                f"A cycle of {number} micro-batch{'es' if number > 1 else ''} had no items at all (no target that its"
                " loss averages over): it was skipped, without a step of the optimizer or the learning-rate schedule."
            )
        return False

    def _skips_non_finite(self, gate: OptimizerGate) -> bool:
        if not self._not_finite:
            tensors = [self._running_loss.total]
            if getattr(self.precision_plugin, "scaler", None) is None:
                tensors += [*(parameter.grad for parameter in gate.parameters), *gate.aside.tensors()]
            self._not_finite = self._sum_over_ranks([float(not all_finite(tensors))])[0] > 0
            if not self._not_finite:
                return False
            self.skipped_cycles += 1
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if self._skipped_last == self._cycles - 1 else 1
            self._skipped_last = self._cycles
            self._lose(
                self._cycle.losses,
                "a loss or a gradient of the cycle is infinite or NaN, and `skip_non_finite` skips it on all ranks",
            )
            if self._skipped_in_a_row == _HOPELESS:
                self._step_skipped = True
                self._finish_cycle()
                raise RuntimeError(
                    f"{_HOPELESS} cycles in a row had an infinite or NaN loss or gradient, and `skip_non_finite=True`"
                    " skipped them all: nothing is trained any more, and `max_steps` would never be reached. The"
                    " weights may hold NaN themselves; go back to an earlier checkpoint, with a lower learning rate or"
                    " `gradient_clip_val`."
                )
        self._step_skipped = gate.skipped = True
        gate.aside.clear()
        for parameter in gate.parameters:
            parameter.grad = None
        return True

    # ---------------------------------------------------------------- what the gates ask

    def gates_steps(self) -> bool:
        """Whether a step of the module's belongs to a cycle of more than one micro-batch."""
        return self._manual and self._active and self._current is not None and self._current.length > 1

    def closes_cycle(self) -> bool:
        """Whether the micro-batch that runs is the last one of its cycle."""
        return self._current is not None and self._current.last

    def has_lost_gradients(self, gate: OptimizerGate) -> bool:
        """Whether another optimizer's step has set gradients of common parameters aside, and no backward came since."""
        others = [other for other in self._gates if other is not gate and other.took]
        own = {id(parameter) for parameter in gate.parameters} if others else set()
        return any(id(parameter) in own for other in others for parameter in other.parameters)

    def _before_clipping(self, optimizer: Optimizer) -> bool:
        if self.skips_steps():
            return False
        if not self.gates_steps():
            return True
        if not self.closes_cycle():
            return False
        gate = self._gate_of(optimizer)
        return gate is None or (gate.has_gradients_to_clip() and gate.complete())

    def _scheduler_may_step(self, interval: str, optimizer: Any) -> bool:
        if not self._trainer.training:
            return True
        assert self.lightning_module is not None
        if not self._manual:
            ready = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
            stepped = not self._step_skipped and self._current is not None and self._current.ready == ready
            return interval != "step" or stepped
        if self.skips_steps():
            return False
        if self.lightning_module._current_fx_name not in _BATCH_HOOKS or self._current is None:
            return True
        # One optimizer's step may be skipped, and another's of the same cycle not.
        gate = self._gate_of(unwrapped(optimizer))
        skipped = self._step_skipped if gate is None or gate.skipped is None else gate.skipped
        return self._current.last and not skipped
