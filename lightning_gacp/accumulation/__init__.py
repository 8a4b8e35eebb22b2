"""Exact gradient accumulation. Knows torch, not Lightning: everything here can be used in a plain PyTorch loop."""

from lightning_gacp.accumulation.counters import CausalLMTargets, Samples, Targets, make_counter
from lightning_gacp.accumulation.cycle import AccumulationCycle, CycleResult, MicroBatch

__all__ = ["AccumulationCycle", "CausalLMTargets", "CycleResult", "MicroBatch", "Samples", "Targets", "make_counter"]
