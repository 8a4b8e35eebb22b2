"""The strategies: exact accumulation cycles on Lightning's own engines."""

from lightning_gacp.strategies.ddp import GACPDDPStrategy
from lightning_gacp.strategies.mixin import AccumulationMixin
from lightning_gacp.strategies.sharded import GACPFSDPStrategy, GACPModelParallelStrategy
from lightning_gacp.strategies.single_device import GACPStrategy

__all__ = ["AccumulationMixin", "GACPDDPStrategy", "GACPFSDPStrategy", "GACPModelParallelStrategy", "GACPStrategy"]
