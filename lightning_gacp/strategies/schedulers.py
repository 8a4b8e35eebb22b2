"""Learning-rate schedulers that move only with the optimizer; Lightning's scheduler of accumulation.

``step`` is gated by a generated subclass. Patching it onto the instance would put the patch into every checkpoint: a
scheduler's ``state_dict`` takes all instance attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

# (class of the scheduler, gate) of every scheduler whose class is swapped now, by its id.
_MARK = "_gacp_original_class"


def gate_scheduler(scheduler: Any, may_step: Callable[[], bool]) -> bool:
    """Makes ``scheduler.step`` do nothing while ``may_step()`` is false.

    Args:
        scheduler: Any object with a ``step`` method.
        may_step: Asked at each call.

    Returns:
        Whether it had no gate yet.
    """
    original = type(scheduler)
    if hasattr(original, _MARK):
        return False

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(gated, self).step(*args, **kwargs) if may_step() else None

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, _MARK: original, "step": step}
    gated: Any = type(original.__name__, (original,), names)
    scheduler.__class__ = gated
    return True


def release_scheduler(scheduler: Any) -> None:
    """Gives the scheduler its class back."""
    original = getattr(type(scheduler), _MARK, None)
    if original is not None:
        scheduler.__class__ = original


def follow_schedulers_again(trainer: Trainer) -> None:
    """Sets the length of cycles that a ``GradientAccumulationScheduler`` has set at the start of the present epoch.

    Lightning does not call that hook again when it resumes inside an epoch, and would go on with the first length.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
