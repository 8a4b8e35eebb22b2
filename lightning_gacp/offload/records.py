"""What stands for a saved tensor, and who owns it.

Note: [The graph owns the record]
    Autograd keeps, in place of each saved tensor, the object that the pack hook returned: `Kept` or `Offloaded`. An
    `Offloaded` owns a `Record` (several may own the same one), and nothing else does: the engine has weak references.
    So whatever happens to the graph, evaluation, an exception, ``retain_graph``, a second backward, an output
    that no loss uses, the record lives exactly as long as somebody could ask for the tensor.

Note: [Storages, not tensors]
    What is moved is the storage of a saved tensor, byte for byte, and how the tensor lies in it is remembered with each
    pack. So every layout comes back as it was, a transposed view and its base share one copy, the three slices of
    a fused ``qkv`` do too, and an expanded tensor moves no more than what it is expanded from. Sharing needs a
    version counter that tells every change: that of the tensor they are views of. Where a tensor is part of a storage
    without being a view (the gates of an LSTM cell, which are changed in place one by one), it stays on the device.

Note: [Finalisers only append]
    The garbage collector runs a `Record`'s finaliser in any thread at any allocation, also in one that holds
    the engine's lock, or some lock of the application. So it takes no lock and touches no device: it appends the
    `HostCopy` to a deque, whose ``append`` is atomic, and the engine gives the memory back when it next runs.
"""

import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from lightning_gacp.offload.device import Event, Stream
from lightning_gacp.offload.pool import Piece

if TYPE_CHECKING:
    from lightning_gacp.offload.order import Call


class Geometry(NamedTuple):
    """How a tensor lies in its storage. Each pack has its own, also where two tensors share a storage."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Geometry":
        """The geometry of ``tensor``."""
        return cls(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def place(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor that lies like this in ``storage``."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage,
            self.offset,
            self.size,
            self.stride,
        )


def weak_storage(storage: torch.UntypedStorage) -> StorageWeakRef:
    """A weak reference. While it exists no other storage gets the same address."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def storage_behind(weak: StorageWeakRef | None) -> torch.UntypedStorage | None:
    """The storage, if somebody still holds it."""
    if weak is None or weak.expired():  # type: ignore[no-untyped-call]
        return None
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return storage


def root_of(tensor: Tensor) -> Tensor:
    """The tensor that ``tensor`` is a view of, or itself. Two tensors that share it share their version."""
    return tensor if tensor._base is None else tensor._base


def size_of(tensor: Tensor) -> int:
    """Bytes of any tensor; 0 where it cannot say."""
    try:
        return tensor.numel() * tensor.element_size()
    except (RuntimeError, NotImplementedError):
        return 0


class HostCopy:
    """The copy of one storage in host memory, and what is in motion between it and the device.

    The engine changes it, under its lock. Which stream may touch which of its buffers is said in the engine.
    """

    __slots__ = (
        "address",
        "arrived",
        "arriving",
        "copied",
        "destination_stream",
        "handed",
        "in_flight",
        "nbytes",
        "pieces",
        "root",
        "source",
        "source_storage",
        "source_stream",
        "spoiled",
        "version",
    )

    def __init__(self, tensor: Tensor, pieces: list[Piece], stream: Stream, copied: Event) -> None:
        storage = tensor.untyped_storage()
        self.address = storage._cdata
        self.nbytes = storage.nbytes()
        self.pieces = pieces
        self.version = tensor._version
        self.root = TensorWeakRef(root_of(tensor))
        # While this exists, `address` means the same storage.
        self.source_storage = weak_storage(storage)
        self.source_stream = stream
        self.source: Tensor | None = None
        """The tensor, while it is in flight."""
        self.in_flight = True
        self.copied = copied
        """The host copy is complete."""
        self.spoiled: int | None = None
        """The version that the source got while it was in flight: the host copy is worth nothing."""
        self.arriving: Tensor | None = None
        """The destination of a reload, as bytes, that somebody will ask for."""
        self.destination_stream: Stream = None
        self.arrived: Event | None = None
        """The last reload is complete: the destination may be read, the slot written."""
        self.handed: StorageWeakRef | None = None
        """The destination that was last given to autograd. (A source may be changed in place later.)"""


class Shelf:
    """Copies that something of is held on the device, oldest first, with their bytes."""

    def __init__(self) -> None:
        self.copies: dict[HostCopy, None] = {}
        self.nbytes = 0
        self.peak = 0

    def add(self, copy: HostCopy) -> None:
        """Put ``copy`` in."""
        self.copies[copy] = None
        self.nbytes += copy.nbytes

    def remove(self, copy: HostCopy) -> None:
        """Take ``copy`` out."""
        del self.copies[copy]
        self.nbytes -= copy.nbytes

    def oldest(self) -> HostCopy:
        """What has been in for longest."""
        return next(iter(self.copies))

    def note_peak(self) -> None:
        """Remember the most bytes there were."""
        self.peak = max(self.peak, self.nbytes)


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
    """A saved tensor that was moved to the host: the ``index``-th of ``call``."""

    __slots__ = ("call", "geometry", "index", "record")

    def __init__(self, call: "Call", record: Record, geometry: Geometry) -> None:
        self.call = call
        self.record = record
        self.geometry = geometry
        self.index = len(call.records)
        call.records.append(weakref.ref(record))


def changed_in_place(size: tuple[int, ...], dtype: torch.dtype, found: int, expected: int) -> RuntimeError:
    """The error that autograd raises without hooks."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype}, {list(size)}] is at version {found}; expected version {expected} instead. It was saved inside an "
        "offloaded block. Write the out-of-place form of what changed it, such as `x = x + y` for `x += y`."
    )
