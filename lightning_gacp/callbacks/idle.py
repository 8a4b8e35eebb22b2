"""Settings of the callbacks that have no effect: said once a fit, on rank 0, with what to write instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_gacp.blocks import Block
from lightning_gacp.callbacks.terminal import size_text

_BECAUSE = {
    "smaller than min_bytes": "are smaller than `min_bytes`",
    "in one of the last blocks": "are in the last blocks, which `keep_last` leaves alone",
    "host memory is full": "found no room within `max_host_bytes`",
    "on another device": "are on no accelerator: was `accelerator='cpu'` meant?",
    "parameter or buffer": "are parameters or buffers",
    "cast of a parameter": "are parameters in another dtype",
}
"""Why tensors stay on the device, by the reasons that the engine counts."""


def say_if_one_is_all(found: Sequence[Block], every_n_layers: int) -> None:
    """Say so where ``every_n_layers`` reaches past the end of every stack of blocks."""
    longest = max(Counter(block.stack for block in found).values())
    if every_n_layers > longest:
        rank_zero_warn(
            f"`every_n_layers={every_n_layers}` is more than there are blocks in a row ({longest}): only the first is"
            f" recomputed. Write `every_n_layers={max(1, longest // 2)}` or less to recompute more."
        )


def say_if_not_training(pl_module: LightningModule, names: Sequence[str]) -> None:
    """Say so where blocks that are to be recomputed are in evaluation mode while the model is trained."""
    parts: dict[str, nn.Module] = dict(pl_module.named_modules())
    idle = [name for name in names if not parts[name].training]
    if idle:
        shown = ", ".join(f"`{name}`" for name in idle[:3]) + (", ..." if len(idle) > 3 else "")
        rank_zero_warn(
            f"{len(idle)} of {len(names)} checkpointed blocks are in evaluation mode while the model is trained, and"
            f" are not recomputed: {shown}. Write `.train()` for these modules, or leave them out with `blocks=`."
        )


def say_if_nothing_moved(engine: Any, setting: str) -> None:
    """Say so, and why, where offload is on and has moved nothing in the first micro-batch."""
    stats = engine.stats()
    if not stats["active"] or stats["offloaded_tensors"]:  # without an accelerator, that was said already
        return
    reasons = [
        f"{number} ({size_text(stats['kept_bytes'][reason])}) {_BECAUSE.get(reason, f'stay: {reason}')}"
        for reason, number in sorted(stats["kept_tensors"].items(), key=lambda item: -item[1])
    ]
    why = "; ".join(reasons) or "they save nothing"
    rank_zero_warn(f"`{setting}` has no effect: nothing was moved of what the blocks save for their backward. {why}.")


def say_if_no_batch_norm(there_are: bool, cycle_length: int) -> None:
    """Say so where ``scale_batchnorm_momentum`` has nothing to scale."""
    if not there_are:
        rank_zero_warn("`scale_batchnorm_momentum=True` has no effect: the model has no batch norm.")
    elif cycle_length == 1:
        rank_zero_warn(
            "`scale_batchnorm_momentum=True` has no effect without accumulation: cycles have one micro-batch."
        )
