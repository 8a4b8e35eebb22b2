"""The layer around a block: saved-tensor hooks that are active inside its forward."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_gacp.offload.device import Device
from lightning_gacp.offload.engine import OffloadEngine
from lightning_gacp.offload.filters import Filter
from lightning_gacp.offload.order import Call
from lightning_gacp.offload.records import Kept, Offloaded

_NOT_COMPILED = (
    "activation offload takes saved tensors from outside of the compiled code: the graph breaks at each block, and "
    "what is inside the block is compiled. Use `fullgraph=False`, or compile the blocks: `block.compile()`"
)


class OffloadLayer:
    """Offloads what one block saves for its backward, in each call with gradients enabled.

    Args:
        engine: Shared by the blocks of a model.
        name: Path of the block, for messages.
        index: Number of the block among those of the engine.
        keep: Save everything on the device: for the last blocks, whose backward comes first. The hooks are there all
            the same, as the first of these backwards is the time to bring back what the block before needs.
        min_bytes: Smaller tensors stay on the device.
    """

    def __init__(self, engine: OffloadEngine, name: str, index: int, keep: bool, min_bytes: int) -> None:
        self.engine = engine
        self.name = name
        self.index = index
        self.keep = keep
        self.min_bytes = min_bytes

    @torch.compiler.disable(recursive=False, reason=_NOT_COMPILED)  # type: ignore[untyped-decorator, no-untyped-call]
    def __call__(
        self, block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the block's forward with the hooks active."""
        device = self.engine.device
        if device is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with self._hooks(block, device):
            return forward(*args, **kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # else the compiler would look into the engine
    def _hooks(self, block: nn.Module, device: Device) -> saved_tensors_hooks:
        if _inside_checkpoint():
            raise inside_checkpoint(self.name)
        # Private, since torch has no public question for this; its stubs lack the first of the two.
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            why = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
            raise RuntimeError(
                f"`{self.name}` is offloaded by hooks on saved tensors, which are switched off here: {why} Run the "
                "model without the offload there: call `remove()` on what was applied."
            )
        if device.capturing():
            raise RuntimeError(
                f"`{self.name}` is offloaded, and its forward is being captured into a graph of the device. A replay "
                "would copy to host memory that belongs to other tensors by then. Capture the model without the "
                "offload: call `remove()` on what was applied."
            )
        call = self.engine.begin(self.index)
        keep_because = None if not self.keep else "in one of the last blocks"
        return saved_tensors_hooks(
            functools.partial(_pack, call, keep_because, Filter(block, device, self.min_bytes)), unpack
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _pack(call: Call, keep_because: str | None, keep: Filter, tensor: Tensor) -> Kept | Offloaded:
    return call.engine.pack(call, tensor, keep_because or keep.reason_to_keep(tensor))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def unpack(saved: Kept | Offloaded) -> Tensor:
    """The hook that autograd calls for a saved tensor, from the thread and on the stream of its backward."""
    return saved.call.engine.unpack(saved)


def inside_checkpoint(name: str) -> ValueError:
    """The error for a block whose saved tensors would never reach the checkpoint around it."""
    return ValueError(
        f"`{name}` is offloaded inside a module that is checkpointed: what it saves would be kept, and nothing would "
        "be recomputed. Give the offload the block that is checkpointed, with `blocks=`, or use "
        "`ActivationCheckpointing(offload=True)`."
    )


def _inside_checkpoint() -> bool:
    """Whether the hooks around this call are those of a checkpoint, by whatever it was applied."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None else top(False)
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"
