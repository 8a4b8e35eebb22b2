"""The gradients of an open cycle under FSDP2: whole in a whole checkpoint, as shards beside those of the weights."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import load, save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

Named = dict[str, Tensor]


def copy_whole(gradient: Tensor | None) -> Tensor | None:
    """The whole gradient on the host; a collective call. A reduced gradient is the mean over ranks already."""
    if gradient is None:
        return None
    gradient = gradient.detach()
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).to("cpu", copy=True)


def distribute_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Shards a whole gradient, which every rank has, as ``parameter`` is sharded."""
    if not isinstance(parameter, DTensor) or isinstance(gradient, DTensor):
        return gradient
    return distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)


@contextmanager
def state_left_alone(optimizer: Optimizer) -> Generator[None, None, None]:
    """Around torch's reading of an optimizer's state: one that has not stepped has none, before and after.

    torch makes a state for it by a step with zeros, which counts as a step from then on, and makes none where there
    are gradients, which no later loading accepts.
    """
    if optimizer.state:
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        optimizer.state.clear()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def write_shards(path: Path, folder: str, gradients: Named, aside: Named, is_first: bool) -> dict[str, list[str]]:
    """Writes every rank's shards into a new ``folder``; a collective call.

    Args:
        path: The checkpoint's. An earlier one there keeps its own shards until ``remove_other_shards``: were the new
            one not finished, it would go on with gradients that are not its own.
        folder: In it.
        gradients: By optimizer and place in it.
        aside: Those set aside.
        is_first: Whether this is the rank that makes and removes files.

    Returns:
        What stands for them in the checkpoint itself: their names.
    """
    if is_first:
        if path.is_file():  # Lightning replaces it by a folder too
            path.unlink()
        shutil.rmtree(path / folder, ignore_errors=True)
        (path / folder).mkdir(parents=True)
    torch.distributed.barrier()
    save({**_flat("gradients", gradients), **_flat("aside", aside)}, checkpoint_id=path / folder)
    return {"gradients": list(gradients), "aside": list(aside)}


def remove_other_shards(folder: Path, keep: str | None) -> None:
    """Removes what earlier checkpoints of the same name left in ``folder``, all but ``keep``."""
    kept = folder.parent / keep if keep else None
    for old in folder.iterdir() if folder.is_dir() else ():
        if old != kept:
            shutil.rmtree(old, ignore_errors=True)
    if kept is None and folder.is_dir():
        folder.rmdir()


def read_shards(folder: Path, state: dict[str, Any], parameters: Sequence[Sequence[Tensor]]) -> tuple[Named, Named]:
    """Reads what ``write_shards`` wrote, for any number of ranks; a collective call.

    Args:
        folder: The one written to.
        state: The names, as ``write_shards`` returned them.
        parameters: Of each optimizer.

    Returns:
        The gradients, and those set aside, sharded as the parameters are.
    """
    named = {f"{i}.{j}": p for i, group in enumerate(parameters) for j, p in enumerate(group)}
    gradients, aside = (
        {name: torch.zeros_like(named[name], dtype=getattr(named[name], "grad_dtype", None)) for name in state[kind]}
        for kind in ("gradients", "aside")
    )
    load({**_flat("gradients", gradients), **_flat("aside", aside)}, checkpoint_id=folder)
    return gradients, aside


def _flat(kind: str, tensors: Named) -> dict[str, Any]:
    return {f"{kind}.{name}": tensor.detach() for name, tensor in tensors.items()}
