"""Exact gradient accumulation, activation checkpointing and activation offload for PyTorch Lightning.

Importing the package registers its strategies, so that ``Trainer(strategy="gacp")`` works.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gacp.__about__ import __version__
from lightning_gacp.accumulation import AccumulationCycle, CausalLMTargets, Samples, Targets
from lightning_gacp.strategies import (
    AccumulationMixin,
    GACPDDPStrategy,
    GACPFSDPStrategy,
    GACPModelParallelStrategy,
    GACPStrategy,
)

__all__ = [
    "AccumulationCycle",
    "AccumulationMixin",
    "CausalLMTargets",
    "GACPDDPStrategy",
    "GACPFSDPStrategy",
    "GACPModelParallelStrategy",
    "GACPStrategy",
    "Samples",
    "Targets",
    "__version__",
]

for _strategy in (GACPStrategy, GACPDDPStrategy, GACPModelParallelStrategy, GACPFSDPStrategy):
    _strategy.register_strategies(StrategyRegistry)
