"""The optimizer inside of Lightning's wrapper."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that steps: what Lightning has wrapped, else the optimizer itself.

    Only Lightning's wrapper is taken off. An optimizer that wraps another one (Lookahead, sharpness-aware minimization)
    has a step of its own, whatever it calls the attribute that holds the other.
    """
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
