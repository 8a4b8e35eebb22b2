"""What stands for a saved tensor, and who owns it.

Note: [The graph owns the record]
    Autograd keeps, in place of each saved tensor, the object that the pack hook returned: `Kept` or `Offloaded`. An
    `Offloaded` owns a `Record` (several may own the same one), and nothing else does: the engine has weak references.
    So whatever happens to the graph, evaluation, an exception, ``retain_graph``, a second backward, an output
    that no loss uses, the record lives exactly as long as somebody could ask for the tensor.

Note: [Finalisers only append]
    The garbage collector runs a `Record`'s finaliser in any thread at any allocation, also in one that holds
    the engine's lock, or some lock of the application. So it takes no lock and touches no device: it appends the
    `HostCopy` to a deque, whose ``append`` is atomic, and the engine gives the memory back when it next runs.
"""

import weakref
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_gacp.offload.device import Event, Stream
from lightning_gacp.offload.pool import Piece

if TYPE_CHECKING:
    from lightning_gacp.offload.order import Call

Layout: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]
"""Address of the storage object, size, stride and dtype: what two packs of the same tensor have in common."""


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """A weak reference to the storage of ``tensor``. While it exists no other storage gets the same address."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_alive(storage: StorageWeakRef | None) -> bool:
    """Whether somebody still holds the storage."""
    return storage is not None and not storage.expired()  # type: ignore[no-untyped-call]


def layout_of(tensor: Tensor) -> Layout:
    """The layout of a tensor that begins where its storage begins."""
    return tensor.untyped_storage()._cdata, tuple(tensor.shape), tensor.stride(), tensor.dtype


class HostCopy:
    """The copy of one tensor in host memory, and what is in motion between it and the device.

    The engine changes it, under its lock. Which stream may touch which of its buffers is said in the engine.
    """

    __slots__ = (
        "arrived",
        "arriving",
        "copied",
        "destination_stream",
        "handed",
        "handed_stream",
        "in_flight",
        "layout",
        "nbytes",
        "pieces",
        "source",
        "source_storage",
        "source_stream",
        "spoiled",
        "version",
    )

    def __init__(self, tensor: Tensor, pieces: list[Piece], stream: Stream, copied: Event) -> None:
        self.layout = layout_of(tensor)
        self.nbytes = tensor.numel() * tensor.element_size()
        self.pieces = pieces
        self.version = tensor._version
        # While this exists, the address in `layout` means the same storage.
        self.source_storage = weak_storage(tensor)
        self.source_stream = stream
        self.source: Tensor | None = None
        """The tensor, while it is in flight."""
        self.in_flight = True
        self.copied = copied
        """The host copy is complete."""
        self.spoiled = False
        """The source was changed in place while it was in flight, so the host copy is worth nothing."""
        self.arriving: Tensor | None = None
        """The destination of a reload that nobody has asked for yet."""
        self.destination_stream: Stream = None
        self.arrived: Event | None = None
        """The last reload is complete: the destination may be read, the slot written."""
        self.handed: StorageWeakRef | None = None
        """The storage of the destination that was last given to autograd. (A source may be changed in place later.)"""
        self.handed_stream: Stream = None

    def handed_tensor(self) -> Tensor | None:
        """What was last given to autograd, if it is still alive. (The tensor object is not: autograd copies it.)"""
        if self.handed is None or not is_alive(self.handed):
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.handed.cdata)
        if storage is None:
            return None
        _, size, stride, dtype = self.layout
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, size, stride)


class Record:
    """The handle of a `HostCopy`. When the last of its owners is gone, the copy goes to the engine's deque."""

    __slots__ = ("__weakref__", "_graveyard", "copy")

    def __init__(self, copy: HostCopy, graveyard: "deque[HostCopy]") -> None:
        self.copy = copy
        self._graveyard = graveyard

    def __del__(self) -> None:
        self._graveyard.append(self.copy)


class Kept:
    """A saved tensor that stays on the device. ``tensor`` is detached: the graph must not own its own outputs."""

    __slots__ = ("call", "tensor", "version")

    def __init__(self, call: "Call", tensor: Tensor) -> None:
        self.call = call
        self.tensor = tensor.detach()
        self.version = tensor._version


class Offloaded:
    """A saved tensor that was moved to the host: the ``index``-th that ``call`` moved."""

    __slots__ = ("call", "index", "record")

    def __init__(self, call: "Call", record: Record) -> None:
        self.call = call
        self.record = record
        self.index = len(call.records)
        call.records.append(weakref.ref(record))


def changed_in_place(size: tuple[int, ...], dtype: torch.dtype, found: int, expected: int) -> RuntimeError:
    """The error that autograd raises without hooks."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype}, {list(size)}] is at version {found}; expected version {expected} instead. It was saved inside an "
        "offloaded block. Write the out-of-place form of what changed it, such as `x = x + y` for `x += y`."
    )
