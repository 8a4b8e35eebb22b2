"""Recompute blocks in the backward pass instead of keeping what they saved in the forward pass."""

from lightning_gacp.checkpointing.apply import checkpoint_blocks

__all__ = ["checkpoint_blocks"]
