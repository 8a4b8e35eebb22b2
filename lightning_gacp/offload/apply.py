"""Put the offload around the blocks of a model, and take it off again."""

import logging
import os
from collections.abc import Sequence

import torch
from torch import nn

from lightning_gacp.blocks import Block, Selector, evenly_spaced, find_blocks
from lightning_gacp.offload.accelerator import AcceleratorDevice
from lightning_gacp.offload.device import Device
from lightning_gacp.offload.engine import OffloadEngine
from lightning_gacp.offload.hooks import OffloadLayer, inside_checkpoint
from lightning_gacp.wrapping import Applied, layer_of, refuse_unwrappable, unwrap, wrap

_log = logging.getLogger("lightning_gacp")

NO_ACCELERATOR = (
    "Activation offload has no effect here: there is no accelerator with memory of its own to move activations from. "
    "The numbers are the same."
)
"""The one line of a machine without an accelerator."""


class _Find:
    """Stands for: use the accelerator of this machine."""


FIND = _Find()


class AppliedOffload(Applied):
    """Blocks that offload, and their engine."""

    engine: OffloadEngine
    """Its ``stats()`` says what was moved."""


def offload_blocks(
    module: nn.Module,
    blocks: Selector | Sequence[Selector] | None = None,
    fraction: float = 1.0,
    min_bytes: int = 1 << 20,
    max_host_bytes: int | None = None,
    keep_last: int = 1,
    prefetch: int = 1,
    *,
    device: Device | _Find | None = FIND,
) -> AppliedOffload:
    """Keep what the blocks of ``module`` save for their backward in host memory until the backward needs it.

    Nothing is recomputed and the gradients are bit for bit the same. The copies run beside the computation, but there
    are many bytes: about 34 times batch x sequence x hidden for each block of a transformer in 16 bits. Moving only the
    inputs of checkpointed blocks, ``checkpoint_blocks(..., offload=True)``, moves a seventeenth of that.

    Of a block that is checkpointed, only the inputs are moved; what a ``policy`` keeps, such as ``"save_matmuls"``,
    stays on the device, as torch does not show it to hooks.

    Args:
        module: The model.
        blocks: Which blocks: a class, a class name, a pattern of module names, or a list of these. ``None`` finds them.
        fraction: Share of the blocks to offload, evenly spaced.
        min_bytes: Smaller tensors stay on the device.
        max_host_bytes: Cap of the pinned host memory. ``None``: what is available less a reserve, over the local ranks.
            At the cap, tensors stay on the device.
        keep_last: So many of the chosen blocks, at the end, keep everything on the device: the backward needs it at
            once.
        prefetch: How many blocks ahead of the backward tensors are brought back. 0: only when they are needed.
        device: For tests.

    Returns:
        The names of the blocks, ``remove()``, and the ``engine`` with its ``stats()``.

    Raises:
        ValueError: No block matched, an argument is out of range, a block is offloaded already, or it lies inside a
            module that is checkpointed.
        TypeError: An argument is of the wrong type.
    """
    chosen = evenly_spaced(find_blocks(module, blocks), fraction)
    return offload_selected(
        module,
        chosen,
        min_bytes=min_bytes,
        max_host_bytes=max_host_bytes,
        keep_last=keep_last,
        prefetch=prefetch,
        device=device,
    )


def offload_selected(
    module: nn.Module,
    blocks: list[Block],
    *,
    min_bytes: int = 1 << 20,
    max_host_bytes: int | None = None,
    keep_last: int = 1,
    prefetch: int = 1,
    device: Device | _Find | None = FIND,
) -> AppliedOffload:
    """Offload exactly ``blocks`` of ``module``. See `offload_blocks` for the other arguments."""
    check_numbers(min_bytes=min_bytes, max_host_bytes=max_host_bytes, keep_last=keep_last, prefetch=prefetch)
    _check_blocks(module, blocks)
    found = AcceleratorDevice.find() if isinstance(device, _Find) else device
    engine = OffloadEngine(found, max_host_bytes=max_host_bytes, prefetch=prefetch)
    if found is None:
        if _is_first_rank():
            _log.warning(NO_ACCELERATOR)
    else:
        for index, block in enumerate(blocks):
            keep = index >= len(blocks) - keep_last
            wrap(block.module, "offload", OffloadLayer(engine, block.name, index, keep, min_bytes))

    def undo() -> None:
        for block in blocks:
            layer = layer_of(block.module, "offload")
            if isinstance(layer, OffloadLayer) and layer.engine is engine:
                unwrap(block.module, "offload")
        engine.drain()

    applied = AppliedOffload([block.name for block in blocks], undo)
    applied.engine = engine
    return applied


def check_numbers(**numbers: int | None) -> None:
    """Refuse settings that are no whole numbers from 0 on, or ``None`` where that has a meaning.

    Raises:
        TypeError: One is no integer.
        ValueError: One is negative.
    """
    for name, value in numbers.items():
        if value is None and name == "max_host_bytes":
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"`{name}={value!r}` must be an integer; write for instance `{name}=1`.")
        if value < 0:
            raise ValueError(f"`{name}={value}` must not be negative; write for instance `{name}=1`.")


def _is_first_rank() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0


def _check_blocks(module: nn.Module, blocks: list[Block]) -> None:
    """Refuse, before anything is changed, what could not work."""
    modules = dict(module.named_modules())
    for block in blocks:
        refuse_unwrappable(block.module)
        if layer_of(block.module, "offload") is not None:
            raise ValueError(
                f"`{block.name}` is offloaded already; leave out one of the two callbacks, or call `remove()` on "
                "what was applied first."
            )
        path = block.name.split(".")
        for depth in range(len(path)):
            around = modules.get(".".join(path[:depth]))
            if around is not None and around is not block.module and layer_of(around, "checkpoint") is not None:
                raise inside_checkpoint(block.name)
