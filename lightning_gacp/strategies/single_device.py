"""``gacp``: exact accumulation on one device."""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.fabric.strategies import _StrategyRegistry
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_gacp.strategies.mixin import AccumulationMixin


class GACPStrategy(AccumulationMixin, SingleDeviceStrategy):
    """Exact gradient accumulation on one device. The arguments are those of ``AccumulationMixin``.

    Example::

        Trainer(strategy=GACPStrategy(accumulate_grad_batches=8))
        Trainer(strategy="gacp", accumulate_grad_batches=8)
    """

    strategy_name = "gacp"

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The device, in a list. Lightning hands the devices it chose only to strategies that have this property."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and len(devices) > 1:
            raise MisconfigurationException(
                f'`strategy="{self.strategy_name}"` trains on one device, and the Trainer found {len(devices)}.'
                " Set `devices=1`, or"
                ' write `strategy="gacp_ddp"` (every device holds the model) or `strategy="gacp_model_parallel"`'
                " (FSDP2)."
            )
        if devices:
            self._devices = list(devices)
            self._root_device = devices[0]

    _devices: list[torch.device] | None = None

    def __repr__(self) -> str:
        # The Trainer of the other import tree shows this in its refusal.
        hint = ""
        if "pytorch_lightning" in sys.modules:
            hint = ", for `lightning.pytorch.Trainer`: write `import lightning.pytorch as pl`, not `pytorch_lightning`"
        return f"<{type(self).__name__} of `lightning_gacp`{hint}>"

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers the name ``gacp``."""
        register(strategy_registry, cls.strategy_name, cls, "Exact gradient accumulation on one device")


def register(registry: _StrategyRegistry, name: str, cls: Any, description: str, **init_params: Any) -> None:
    """Registers a strategy; again, where a notebook reloads the package."""
    registry.register(name, cls, description=description, override=True, **init_params)
