"""The table at the start of a fit: what is done to which blocks, and what that saves and costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from lightning_gacp.callbacks.block_costs import BlockCost
from lightning_gacp.callbacks.terminal import flops_text, show, size_text
from lightning_gacp.callbacks.treatment import MicroBatchMemory, Treatment

CostOf: TypeAlias = Callable[[Iterable[str]], BlockCost | None]


def startup_rows(treated: Sequence[Treatment], cost_of: CostOf) -> list[tuple[str, str, str, str]]:
    """Return one row for the blocks of a stack that are of the same class and treated alike."""
    groups: dict[tuple[str, str, str], list[Treatment]] = {}
    for treatment in treated:
        key = (treatment.block.stack, type(treatment.block.module).__name__, treatment.words)
        groups.setdefault(key, []).append(treatment)
    rows = []
    for (_, cls, words), group in groups.items():
        names = [treatment.block.name for treatment in group]
        rows.append((names_text(names), f"{len(names)} x {cls}", words, kept_text(group[0], cost_of(names))))
    return rows


def kept_text(alike: Treatment, cost: BlockCost | None) -> str:
    """Return what blocks keep for their backward: without treatment, and with it where that is something else."""
    if cost is None:
        return "unknown"
    before = size_text(cost.input_bytes + cost.saved_bytes)
    if alike.offloaded:
        return f"{before} -> on the host"
    return f"{before} -> {size_text(cost.input_bytes)}" if alike.recomputed else before


def names_text(names: Sequence[str]) -> str:
    """Return the names of neighbours in short: ``model.blocks.{0,2,4}``."""
    parents = {name.rpartition(".")[0] for name in names}
    if len(names) == 1 or len(parents) > 1:
        return ", ".join(names)
    last = [name.rpartition(".")[2] for name in names]
    parent = parents.pop()
    short = ",".join(last if len(last) <= 8 else [*last[:6], "...", last[-1]])
    return f"{parent}.{{{short}}}" if parent else f"{{{short}}}"


def startup_lines(memory: MicroBatchMemory | None, cycle_length: int, counting: str) -> list[str]:
    """Return the sentences below the table."""
    lines = [f"cycle: {cycle_length} micro-batch{'es' if cycle_length != 1 else ''} an optimizer step"]
    if counting:
        lines[0] += f"; counted as items: {counting}"
    if memory is None:
        return lines
    if memory.saved is not None and memory.saved_without is not None:
        line = f"first micro-batch: autograd keeps {size_text(memory.saved)} on the device"
        if memory.saved != memory.saved_without:
            share = memory.saved / memory.saved_without
            line += f" instead of {size_text(memory.saved_without)} ({share:.0%})"
        lines.append(line)
    else:
        lines.append("first micro-batch: saved bytes unknown (sharded parameters, or blocks with opaque arguments)")
    if memory.recomputed_flops and memory.block_flops:
        # A backward costs twice its forward, so the whole step of the blocks is three times their forward.
        share = memory.recomputed_flops / (3 * memory.block_flops)
        lines.append(
            f"recomputed: {flops_text(memory.recomputed_flops)} a micro-batch, {share:.0%} more than the blocks' "
            "forward and backward"
        )
    if memory.offloaded:
        lines.append(f"moved to the host: {size_text(memory.offloaded)} a micro-batch")
    return lines


def print_startup_table(
    treated: Sequence[Treatment], cost_of: CostOf, memory: MicroBatchMemory | None, cycle_length: int, counting: str
) -> None:
    """Print the table; on rank 0 only.

    Args:
        treated: The blocks.
        cost_of: What blocks of these names cost for a micro-batch.
        memory: What the first micro-batch showed; ``None`` where it was not measured.
        cycle_length: Micro-batches between two optimizer steps.
        counting: What is counted as items, in words.
    """
    columns = ("blocks", "class", "activations", "kept a micro-batch")
    show("lightning_gacp", columns, startup_rows(treated, cost_of), startup_lines(memory, cycle_length, counting))
