"""Manual optimization as if it were automatic: ``step`` and ``zero_grad`` that know where the cycle stands.

A module in manual optimization calls ``zero_grad``, ``manual_backward`` and ``step`` on every micro-batch. Inside an
open cycle:

* ``step()`` sets the optimizer's gradients aside instead of stepping;
* the next ``zero_grad()`` drops what has come since (another optimizer's loss may leave gradients here: a GAN's
  generator does) and puts the gradients that were set aside back.

Ignoring both calls would be simpler and wrong: what the generator left would be stepped with.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_gacp.accumulation.gradients import SetAside

# What a gate remembers from one micro-batch to the next.
_STATE = ("steps", "backwards", "_holds_earlier", "_dirty", "_consumed", "_zeroes_every_time")


class NothingToStep(Exception):
    """Leaves the optimizer's step from inside its closure."""


class CycleView(Protocol):
    """What a gate needs to know about the cycle; the strategy is it."""

    def gates_steps(self) -> bool:
        """Whether a step of the module's belongs to a cycle of more than one micro-batch."""

    def skips_steps(self) -> bool:
        """Whether this pass over the data must leave the weights as they are."""

    def closes_cycle(self) -> bool:
        """Whether the micro-batch that runs is the last one of its cycle."""

    def ready_to_step(self, gate: OptimizerGate | None = None) -> bool:
        """Brings the gradients to their final value; whether there is anything to step with."""

    def has_one_optimizer(self) -> bool:
        """Whether no other optimizer's loss can leave gradients here."""

    def has_lost_gradients(self, gate: OptimizerGate) -> bool:
        """Whether another optimizer's step has set gradients of common parameters aside, and no backward came since."""

    def gradients_are_views(self) -> bool:
        """Whether ``.grad`` may be a view of memory that others write."""


class OptimizerGate:
    """The books of one optimizer within the cycle.

    Attributes:
        aside: Gradients of this cycle that are kept out of ``.grad``.
        steps: Micro-batches of this cycle in which the module called ``step``.
        backwards: Micro-batches of this cycle in which the module ran a backward.
        stepped_now: Whether the module called ``step`` in this micro-batch.
        stepped_for_real: Whether the optimizer really stepped in this micro-batch.
        skipped: Whether its step at the end of the cycle was skipped; ``None`` before it.
        took: Whether ``step`` has set gradients aside, and no backward has run since.
    """

    def __init__(self, optimizer: Optimizer, cycle: CycleView) -> None:
        self.optimizer = optimizer
        self.aside = SetAside()
        self._cycle = cycle
        self._inside = False
        self._consumed = False
        self._zeroes_every_time = False
        self.start_cycle()

    def start_cycle(self) -> None:
        """Forgets the last cycle, except for what the release of gradients needs to know."""
        self.steps = 0
        self.backwards = 0
        self._backward_now = False
        self._holds_earlier = False
        self._dirty = False
        self.start_micro_batch()

    def state_dict(self) -> dict[str, int | bool]:
        """The books inside an open cycle, as plain numbers."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Continues inside the cycle that ``state_dict`` was taken in."""
        for name in _STATE:
            setattr(self, name, state[name])

    def start_micro_batch(self) -> None:
        """Begins the next micro-batch."""
        self.stepped_now = False
        self.stepped_for_real = False
        self.skipped: bool | None = None
        self.took = False
        self._backward_now = False

    @property
    def parameters(self) -> list[Tensor]:
        """The optimizer's parameters."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def note_backward(self) -> None:
        """A backward runs: whatever is in ``.grad`` may change."""
        self._dirty = True
        self._consumed = self.took = False
        if not self._backward_now:
            self._backward_now = True
            self.backwards += 1

    def has_gradients_to_clip(self) -> bool:
        """Whether a backward has run in this micro-batch; before it, ``.grad`` holds nothing of this step."""
        return self._backward_now

    def can_release(self) -> bool:
        """Whether the gradients have been stepped with, and the module would zero them before it adds to them."""
        return self._consumed and self._zeroes_every_time and not self.aside

    def irregular(self) -> bool:
        """Whether the module stepped on some micro-batches of the cycle and not on others."""
        return 0 < self.steps != self.backwards

    def step(self, step: Callable[..., Any], closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        """Runs the module's ``step`` call: for real at the end of a cycle, and as "set aside" inside it."""
        if self._cycle.skips_steps():
            return None if closure is None else closure()
        if not self._cycle.gates_steps():
            return self._step_ungated(step, closure, **kwargs)
        if self.stepped_now:
            raise MisconfigurationException(
                f"`{type(self.optimizer).__name__}.step()` was called twice in one `training_step`, in a cycle of"
                " several"
                " micro-batches: the second step would need gradients at weights that do not exist yet. Call it once,"
                " or set `accumulate_grad_batches=1`."
            )
        self.stepped_now = True
        self.steps += 1
        output = None
        if closure is not None:
            with torch.enable_grad():
                output = closure()
        if not self._cycle.closes_cycle():
            if self._cycle.has_lost_gradients(self):
                raise MisconfigurationException(
                    f"`{type(self.optimizer).__name__}.step()` came after that of another optimizer with parameters in"
                    " common, for one backward, in a cycle of several micro-batches: their gradients are kept for one"
                    " of the two. Give each parameter to one optimizer, call `zero_grad` and `self.manual_backward`"
                    " between the steps, or set `accumulate_grad_batches=1`."
                )
            self.took = True
            self.aside.take(self.parameters, copy=self._cycle.gradients_are_views())
            self._holds_earlier = self._dirty = False
            return output
        if self.irregular():
            raise MisconfigurationException(self.irregular_message())
        if not self.complete():
            return output
        return self._for_real(step, None if closure is None else lambda: output, **kwargs)

    def _step_ungated(self, step: Callable[..., Any], closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        if closure is None:
            return None if self._has_nothing_to_step() else self._for_real(step, None, **kwargs)

        def checked() -> Any:
            output = closure()
            if self._has_nothing_to_step():
                raise NothingToStep
            return output

        return self._for_real(step, checked, **kwargs)

    def _has_nothing_to_step(self) -> bool:
        return not self._cycle.ready_to_step(self) and all(p.grad is None for p in self.parameters)

    def _for_real(self, step: Callable[..., Any], closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        with self.let_through():
            output = step(closure, **kwargs)
        self.note_step()
        return output

    @contextmanager
    def let_through(self) -> Generator[None, None, None]:
        """Lets the raw optimizer step."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def note_step(self) -> None:
        """Whatever is in ``.grad`` has been stepped with, or skipped as a whole."""
        self._consumed = True
        self._holds_earlier = self._dirty = False

    def holds_unstepped(self) -> bool:
        """Whether a backward has run since the last step and the last ``zero_grad``."""
        return self._dirty

    def complete(self) -> bool:
        """Makes ``.grad`` the gradient of the whole cycle: scaled to its end, with what was set aside.

        Returns:
            Whether there is anything to step with.
        """
        ready = self._cycle.ready_to_step(self)
        if self.aside:
            self.aside.put_back(self.parameters, add=True)
            self._holds_earlier = self._dirty = True  # until the step: to zero them now would lose the cycle
        if not ready:
            self.note_step()
            for parameter in self.parameters:
                parameter.grad = None
        return ready

    def zero_grad(self, zero_grad: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Runs the module's ``zero_grad`` call: drops what has come since the last ``step``, keeps the cycle's."""
        self._zeroes_every_time = True
        if not self._cycle.gates_steps():
            zero_grad(*args, **kwargs)
        elif self.aside:
            if self.stepped_now and not self._cycle.has_one_optimizer():
                # What was set aside stays there: another optimizer's loss may yet leave gradients in `.grad`.
                zero_grad(set_to_none=True)
            else:
                self.aside.put_back(self.parameters)
                self._holds_earlier, self._dirty = True, False
        elif not self._holds_earlier:
            self._dirty = False
            zero_grad(*args, **kwargs)
        elif self._dirty:
            raise MisconfigurationException(
                f"`{type(self.optimizer).__name__}.zero_grad()` was called between a `manual_backward` and its"
                " `step()`, in a"
                " cycle of several micro-batches: it would drop the gradients of the earlier ones. Call `zero_grad()`"
                " before the backward or after the step."
            )

    def irregular_message(self) -> str:
        """Says what the module did."""
        if self.steps > self.backwards:
            return (
                f"`{type(self.optimizer).__name__}.step()` was called without a `self.manual_backward(loss)` before it,"
                " in a cycle of several micro-batches: a gradient of `loss.backward()` has not been weighted for it."
                " Write `self.manual_backward(loss)`, or set `accumulate_grad_batches=1`."
            )
        return (
            f"`{type(self.optimizer).__name__}.step()` was called on {self.steps} of {self.backwards}"
            " micro-batches of a cycle."
            " Either the module accumulates gradients itself (call `zero_grad`, `manual_backward` and `step` on every"
            " batch and leave the accumulation to the strategy, or set `accumulate_grad_batches=1`), or its optimizers"
            " train at different frequencies (only `accumulate_grad_batches=1` can do that)."
        )

    def check_raw_step(self, *_: Any) -> None:
        """Pre-hook of the raw optimizer: a step that does not come through this gate would step inside the cycle."""
        if not self._inside and (self._cycle.gates_steps() or self._cycle.skips_steps()):
            raise MisconfigurationException(
                f"`{type(self.optimizer).__name__}.step()` was called on the raw optimizer, past the strategy that"
                " accumulates its gradients. Take the optimizer from `self.optimizers()`, without"
                " `use_pl_optimizer=False`, or set `accumulate_grad_batches=1`."
            )

    def note_real_step(self, *_: Any) -> None:
        """Post-hook of the raw optimizer: it really stepped (a gradient scaler may have skipped it)."""
        self.stepped_for_real = True


class GACPOptimizer(LightningOptimizer):
    """Lightning's optimizer wrapper, with its ``step`` and ``zero_grad`` sent through a gate in manual optimization."""

    def __init__(self, optimizer: Optimizer, gate: OptimizerGate | None) -> None:
        super().__init__(optimizer)
        self._gate = gate

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps at the end of a cycle; inside it, sets the gradients aside.

        Args:
            closure: Runs forward and backward; called in either case.
            **kwargs: For the optimizer's own ``step``.
        """
        if self._gate is None:
            return super().step(closure, **kwargs)
        return self._gate.step(super().step, closure, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zeroes gradients; inside a cycle, only those that the cycle does not need."""
        if self._gate is None:
            self._optimizer.zero_grad(*args, **kwargs)
        else:
            self._gate.zero_grad(self._optimizer.zero_grad, *args, **kwargs)
