"""Exact gradient accumulation, activation checkpointing and activation offload for PyTorch Lightning.

Importing the package registers its strategies, so that ``Trainer(strategy="gacp")`` works.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gacp.__about__ import __version__
from lightning_gacp.accumulation import AccumulationCycle, CausalLMTargets, Samples, Targets
from lightning_gacp.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_gacp.callbacks.activation_offload import ActivationOffload
from lightning_gacp.callbacks.cycle_loss import CycleLoss
from lightning_gacp.callbacks.memory_timeline import MemoryTimeline
from lightning_gacp.callbacks.monitor import GACPMonitor
from lightning_gacp.callbacks.oom_advice import OOMAdvice
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.offload import offload_blocks
from lightning_gacp.strategies import (
    AccumulationMixin,
    GACPDDPStrategy,
    GACPFSDPStrategy,
    GACPModelParallelStrategy,
    GACPStrategy,
)
from lightning_gacp.strategies.single_device import register

__all__ = [
    "AccumulationCycle",
    "AccumulationMixin",
    "ActivationCheckpointing",
    "ActivationOffload",
    "CausalLMTargets",
    "CycleLoss",
    "GACPDDPStrategy",
    "GACPFSDPStrategy",
    "GACPModelParallelStrategy",
    "GACPMonitor",
    "GACPStrategy",
    "MemoryTimeline",
    "OOMAdvice",
    "Samples",
    "Targets",
    "__version__",
    "checkpoint_blocks",
    "offload_blocks",
]

for _strategy in (GACPStrategy, GACPDDPStrategy, GACPModelParallelStrategy, GACPFSDPStrategy):
    _strategy.register_strategies(StrategyRegistry)
    # What a lone `--trainer.strategy=lightning_gacp.GACPStrategy` comes to: Lightning takes it for a name.
    register(StrategyRegistry, f"{__name__}.{_strategy.__name__}".lower(), _strategy, f"`{_strategy.strategy_name}`")
