"""Exact gradient accumulation, activation checkpointing and activation offload for PyTorch Lightning."""

from lightning_gacp.__about__ import __version__

__all__ = ["__version__"]
