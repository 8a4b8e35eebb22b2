"""What is done to the blocks of a model, read from the model itself, and what that saves for a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_gacp.blocks import Block, find_blocks
from lightning_gacp.callbacks.block_costs import BlockCost, BlockCosts
from lightning_gacp.callbacks.saved_bytes import SavedBytes
from lightning_gacp.wrapping import layer_of


@dataclass(frozen=True)
class Treatment:
    """What is done to one block."""

    block: Block
    recomputed: bool
    offloaded: bool

    @property
    def words(self) -> str:
        """In words, for the table."""
        done = ["recomputed"] * self.recomputed + ["offloaded"] * self.offloaded
        return " + ".join(done) or "kept"


def treatments(module: nn.Module) -> list[Treatment]:
    """Return the blocks of ``module`` with what is done to each, in the order of the model.

    Blocks that nothing is done to are those that `find_blocks` finds; a model without repeated blocks has none.
    """
    try:
        found = {block.name: block for block in find_blocks(module)}
    except ValueError:
        found = {}
    result = []
    for name, part in module.named_modules():
        recomputed, offloaded = (layer_of(part, role) is not None for role in ("checkpoint", "offload"))
        if recomputed or offloaded or name in found:
            block = found.get(name, Block(name, part, name.rpartition(".")[0]))
            result.append(Treatment(block, recomputed, offloaded))
    treated = {t.block.name for t in result if t.recomputed or t.offloaded}
    # A block that holds treated ones, or lies in one, is no block of its own: the user chose other blocks than we find.
    return [t for t in result if t.block.name in treated or not any(_related(t.block.name, name) for name in treated)]


def _related(name: str, other: str) -> bool:
    return name.startswith(f"{other}.") or other.startswith(f"{name}.")


def offload_engines(module: nn.Module) -> list[Any]:
    """Return the offload engines at work in ``module``, each once."""
    engines = {
        id(layer.engine): layer.engine for part in module.modules() if (layer := _offload_layer(part)) is not None
    }
    return list(engines.values())


def _offload_layer(part: nn.Module) -> Any:
    return layer_of(part, "offload")


def offloaded_bytes(module: nn.Module) -> int:
    """Return the bytes that were copied to the host so far."""
    return sum(int(engine.stats()["offloaded_bytes"]) for engine in offload_engines(module))


@dataclass(frozen=True)
class MicroBatchMemory:
    """What autograd keeps on the device for one micro-batch, in bytes, and what was done to make it so.

    Attributes:
        saved: Bytes kept on the device between forward and backward; ``None`` where it is unknown.
        saved_without: What would be kept without recomputation and offload; ``None`` where it is unknown.
        offloaded: Bytes moved to the host.
        recomputed_flops: Operations that the backward repeats; ``None`` where they are unknown.
        block_flops: Operations of one forward of all blocks; ``None`` where they are unknown.
    """

    saved: int | None
    saved_without: int | None
    offloaded: int
    recomputed_flops: int | None
    block_flops: int | None


class MicroBatchMeter:
    """Measures the first micro-batch of a fit, from before its forward until its backward.

    Args:
        module: The model, with recomputation and offload applied.
    """

    def __init__(self, module: nn.Module) -> None:
        self.treatments = treatments(module)
        self._module = module
        self._costs = BlockCosts([treatment.block for treatment in self.treatments])
        self._offloaded_before = offloaded_bytes(module)
        there_anyway = [*module.parameters(), *module.buffers()]
        # Where parameters are sharded, the forward runs on others, which cannot be told from activations.
        self._saved: SavedBytes | None = None
        if all(type(tensor) in (Tensor, nn.Parameter) for tensor in there_anyway):
            self._saved = SavedBytes(there_anyway)
            self._saved.__enter__()

    @property
    def cost_of(self) -> Callable[[Iterable[str]], BlockCost | None]:
        """What the blocks of these names cost for this micro-batch."""
        return self._costs.of

    def close(self) -> None:
        """Stop measuring, and take all hooks off."""
        if self._saved is not None:
            self._saved.__exit__(None, None, None)
        self._costs.close()

    def result(self) -> MicroBatchMemory:
        """Return what was measured, after `close`."""
        moved = offloaded_bytes(self._module) - self._offloaded_before
        recomputed = self._sum(lambda t: t.recomputed)
        offloaded = self._sum(lambda t: t.offloaded)
        recomputed_offloaded = self._sum(lambda t: t.recomputed and t.offloaded)
        everything = self._sum(lambda t: True)
        saved: int | None = None
        without: int | None = None
        if None not in (self._saved, offloaded, recomputed, recomputed_offloaded):
            assert self._saved is not None and offloaded is not None  # for the type checker
            assert recomputed is not None and recomputed_offloaded is not None
            # The hooks of an offloaded block hide what it saves from ours: inputs, and the rest unless recomputed.
            hidden = offloaded.input_bytes + offloaded.saved_bytes - recomputed_offloaded.saved_bytes
            saved = self._saved.total + hidden - moved
            without = self._saved.total + hidden + recomputed.saved_bytes
        return MicroBatchMemory(
            saved=saved,
            saved_without=without,
            offloaded=moved,
            recomputed_flops=None if recomputed is None else recomputed.flops,
            block_flops=None if everything is None else everything.flops,
        )

    def _sum(self, chosen: Any) -> BlockCost | None:
        return self._costs.of(t.block.name for t in self.treatments if chosen(t))
