"""Apply recomputation to the blocks of a model, and undo it."""

import warnings
from collections.abc import Sequence

from torch import nn

from lightning_gacp.blocks import Block, Selector, every_nth, find_blocks
from lightning_gacp.checkpointing.layer import Recomputation
from lightning_gacp.checkpointing.policies import Policy
from lightning_gacp.checkpointing.state import is_traceable
from lightning_gacp.wrapping import Applied, layer_of, refuse_unwrappable, unwrap, wrap

_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
_WRAPPER_CHILD = "_checkpoint_wrapped_module"


def checkpoint_blocks(
    module: nn.Module,
    every_n_layers: int = 1,
    blocks: Selector | Sequence[Selector] | None = None,
    policy: Policy = "full",
    offload: bool = False,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
) -> Applied:
    """Recompute blocks of ``module`` in the backward pass, so that the forward pass keeps only their inputs.

    It acts while a block is in training mode and gradients are enabled. Outputs, gradients, buffers, numbers and small
    tensors that are attributes, random numbers, the state dict and all names stay what they are without it. Not so:
    what a block draws from Python's `random` or from NumPy is drawn anew in the recomputation, and a list or an object
    of its own that a block changes is changed twice. Use torch's random numbers and buffers inside of blocks.

    Args:
        module: The model, or a ``LightningModule`` that holds it. Changed in place.
        every_n_layers: Recompute the first block of each stack and every n-th after it. 1 saves most memory and costs
            one more forward pass of the blocks; n costs the n-th part of it.
        blocks: What a block is: a class, a class name, a pattern of module names such as ``"model.layers.*"``, or a
            list of these. ``None`` finds them.
        policy: ``"full"`` recomputes everything. ``"save_matmuls"`` keeps the outputs of matrix products, convolutions
            and attention, so that recomputation costs none of them. A function is asked for each operation, as
            described at :func:`torch.utils.checkpoint.create_selective_checkpoint_contexts`.
        offload: Keep the inputs of the recomputed blocks in host memory until the backward pass needs them.
        preserve_rng_state: Give the recomputation the random numbers of the forward pass. Without it, dropout draws
            other masks in the recomputation and gradients are wrong.
        determinism_check: ``"default"`` compares shape, dtype and device of what is recomputed, ``"none"`` nothing.

    Returns:
        Has the ``names`` of the changed blocks, and ``remove()``. With ``offload``, ``engine`` counts what was moved.

    Raises:
        ValueError: Nothing matched (the message lists the candidates), ``every_n_layers`` is below 1, ``policy`` or
            ``determinism_check`` is unknown, or a block is checkpointed already or cannot be.

    Example:
        >>> from torch import nn
        >>> layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(4)]
        >>> model = nn.Sequential(*layers)
        >>> with checkpoint_blocks(model, every_n_layers=2) as applied:
        ...     applied.names
        ['0', '2']
    """
    found = find_blocks(module, blocks)
    chosen = every_nth(found, every_n_layers)
    layers = [Recomputation(block.name, policy, preserve_rng_state, determinism_check) for block in chosen]
    _refuse_checkpointed(module, found)
    if not preserve_rng_state:
        _warn_of_dropout(chosen)

    done: list[nn.Module] = []
    offloaded: Applied | None = None

    def undo() -> None:
        if offloaded is not None:
            offloaded.remove()
        while done:
            unwrap(done.pop(), "checkpoint")

    try:
        for block, layer in zip(chosen, layers, strict=True):
            layer.traceable = is_traceable(block.module)
            _wrap_named(block, layer)
            done.append(block.module)
        if offload:
            from lightning_gacp.offload import (
                offload_selected,  # only here: it is not needed without
            )

            offloaded = offload_selected(module, chosen)
    except BaseException:
        undo()
        raise
    applied = Applied((block.name for block in chosen), undo)
    applied.engine = getattr(offloaded, "engine", None)
    return applied


def _warn_of_dropout(chosen: Sequence[Block]) -> None:
    """Say that gradients will be wrong, where that can be seen."""
    for block in chosen:
        for path, part in block.module.named_modules():
            if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
                warnings.warn(
                    f"`preserve_rng_state=False`, but `{block.name}.{path}` draws random numbers: the recomputation "
                    "will draw others and gradients will be wrong. Leave out `preserve_rng_state` or set `p=0`.",
                    stacklevel=3,
                )
                return


def _wrap_named(block: Block, layer: Recomputation) -> None:
    """Wrap a block; an error says which one it was."""
    try:
        wrap(block.module, "checkpoint", layer)
    except (ValueError, TypeError) as error:
        raise type(error)(f"`{block.name}` cannot be checkpointed: {error}") from error


def _refuse_checkpointed(module: nn.Module, found: Sequence[Block]) -> None:
    """Raise where a block would be recomputed twice."""
    flagged = {
        name: flag for name, part in module.named_modules() for flag in _FLAGS if getattr(part, flag, False) is True
    }
    for block in found:
        if layer_of(block.module, "checkpoint") is not None:
            raise ValueError(
                f"`{block.name}` is checkpointed already; leave out one of the two callbacks, or call `remove()` on "
                "what did it."
            )
        if type(block.module).__name__ == "CheckpointWrapper" or _WRAPPER_CHILD in block.name.split("."):
            raise ValueError(
                f"`{block.name}` is inside a `CheckpointWrapper` already. Remove `apply_activation_checkpointing` or "
                "`checkpoint_wrapper` where the model is built.",
            )
        for name, flag in flagged.items():
            if name == "" or block.name == name or block.name.startswith(f"{name}."):
                owner = f"{name}.{flag}" if name else flag
                raise ValueError(
                    f"`{block.name}` is checkpointed already: `{owner}` is True. Switch it off, for instance by "
                    "`model.gradient_checkpointing_disable()`.",
                )
    for block in found:
        try:
            refuse_unwrappable(block.module)
        except (ValueError, TypeError) as error:
            raise type(error)(f"`{block.name}` cannot be checkpointed: {error}") from error
