"""Activation offload: saved tensors wait in host memory for their backward.

- `apply`: `offload_blocks`, `offload_selected`
- `hooks`, `filters`: the hooks around a block, and what they leave alone
- `engine`, `records`, `order`, `pool`: the transfers, who owns what, what comes next, and the host memory
- `device`, `accelerator`: what the engine asks of a device, and the real one
"""

from lightning_gacp.offload.apply import AppliedOffload, offload_blocks, offload_selected
from lightning_gacp.offload.engine import OffloadEngine
from lightning_gacp.offload.statistics import Stats

__all__ = ["AppliedOffload", "OffloadEngine", "Stats", "offload_blocks", "offload_selected"]
