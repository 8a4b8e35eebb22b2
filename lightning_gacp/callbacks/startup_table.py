"""The table at the start of a fit: what is done to which blocks, and what that saves and costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_gacp.callbacks.terminal import flops_text, show, size_text
from lightning_gacp.callbacks.treatment import MicroBatchMemory, Treatment


def startup_rows(treated: Sequence[Treatment]) -> list[tuple[str, str, str, str]]:
    """Return one row for the blocks of a stack that are of the same class and treated alike."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for treatment in treated:
        key = (treatment.block.stack, type(treatment.block.module).__name__, treatment.words)
        groups.setdefault(key, []).append(treatment.block.name)
    return [(names_text(names), cls, str(len(names)), words) for (_, cls, words), names in groups.items()]


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
    treated: Sequence[Treatment], memory: MicroBatchMemory | None, cycle_length: int, counting: str
) -> None:
    """Print the table; on rank 0 only.

    Args:
        treated: The blocks.
        memory: What the first micro-batch showed; ``None`` where it was not measured.
        cycle_length: Micro-batches between two optimizer steps.
        counting: What is counted as items, in words.
    """
    columns: Any = ("blocks", "class", "number", "activations")
    show("lightning_gacp", columns, startup_rows(treated), startup_lines(memory, cycle_length, counting))
