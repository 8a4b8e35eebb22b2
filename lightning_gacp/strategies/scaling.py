"""Gradient scaling and clipping in manual optimization: once a cycle, on the complete and unscaled gradient.

Lightning's plugin unscales inside ``step``, so a module that clips before it (as documented) clips scaled gradients;
and it updates the scaler after every optimizer, so that the second optimizer of a cycle is unscaled by another
factor than its loss was scaled with. ``GradScaler`` has no public switch for either, so both methods are shadowed on
the instance while the fit runs. (Its ``state_dict`` names what it takes: nothing of this reaches a checkpoint.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer


class ManualScaling:
    """Holds a precision plugin to one unscaling per optimizer and cycle, and one scaler update per cycle.

    Args:
        plugin: The precision plugin; its ``scaler`` may be missing or ``None``.
        before_clipping: Called with the raw optimizer before gradients are clipped; returns whether to clip now.
    """

    def __init__(self, plugin: Any, before_clipping: Callable[[Optimizer], bool]) -> None:
        self._plugin = plugin
        self._scaler = getattr(plugin, "scaler", None)
        self._before_clipping = before_clipping
        self._update_is_due = False
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()
        self._clip = plugin.clip_gradients
        plugin.clip_gradients = self._clip_gradients
        if self._scaler is not None:
            self._unscale, self._update = self._scaler.unscale_, self._scaler.update
            self._scaler.unscale_ = self._unscale_once
            self._scaler.update = self._note_step

    def _clip_gradients(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if not self._before_clipping(raw):
            return
        # Optimizers that unscale inside `step` refuse to be clipped: the plugin's own message says so.
        if self._scaler is not None and not getattr(raw, "_step_supports_amp_scaling", False):
            self._unscale_once(raw)
        self._clip(optimizer, *args, **kwargs)

    def _unscale_once(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._unscaled:
            self._unscale(optimizer)
            self._unscaled.add(id(optimizer))

    def _note_step(self, *_: Any) -> None:
        """Stands in for ``scaler.update``, which the plugin calls after each step."""
        self._update_is_due = True

    def before_step(self, optimizer: Optimizer) -> None:
        """A step of an optimizer that has stepped since the last update needs the update first."""
        if id(optimizer) in self._stepped:
            self.finish()
        self._stepped.add(id(optimizer))

    def finish(self) -> None:
        """Updates the scale, if anything was stepped since the last time."""
        self._stepped.clear()
        self._unscaled.clear()
        if self._update_is_due:
            self._update_is_due = False
            self._update()

    def remove(self) -> None:
        """Gives the plugin and the scaler their own methods back."""
        self.finish()
        self._plugin.__dict__.pop("clip_gradients", None)
        if self._scaler is not None:
            self._scaler.__dict__.pop("unscale_", None)
            self._scaler.__dict__.pop("update", None)
