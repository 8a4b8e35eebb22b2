"""Copies between the device and host memory, on two streams of their own.

Note: [Slot]
    Pinned memory of the host. *out* writes it once; the event ``copied`` marks the end. *in* reads it any number of
    times, each time after ``copied``: HOST_WRITTEN. ``arrived`` marks the end of the last time. When the record has
    died, out waits for ``arrived``, SLOT_READ, and the slot may be given to another tensor. Copies out need no order
    among themselves, as they are on one stream. A slab goes only with the engine, and no site is needed then: torch's
    allocator of pinned memory knows the streams that copied from and to it, and waits for them before it gives the
    memory to anybody else.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from lightning_gacp.offload.device import Device, Event, Site, Stream
from lightning_gacp.offload.pool import Piece, SlabPool
from lightning_gacp.offload.records import Geometry, HostCopy
from lightning_gacp.offload.statistics import Counters
from lightning_gacp.watching import STALLED, TO_DEVICE, TO_HOST, Watch, no_watch


class Transfers:
    """The side streams, the events and the host memory of an engine. The engine's lock guards it.

    The streams are made once, as each new one would get a memory pool of its own. Events are used again as soon as the
    waits for them are issued.

    Args:
        device: What is copied from and to.
        count: Where copies, waits and events are counted.
        cap: Returns the most bytes of host memory that may be taken.
    """

    def __init__(self, device: Device, count: Counters, cap: Callable[[], int]) -> None:
        self.device = device
        self.pool = SlabPool(device.allocate_host, cap)
        self.watch: Watch = no_watch
        self._count = count
        self._events: list[Event] = []
        self._streams: tuple[Stream, Stream] | None = None

    @property
    def streams(self) -> int:
        """How many streams were made."""
        return 0 if self._streams is None else len(self._streams)

    def start_out(self, tensor: Tensor, stream: Stream) -> HostCopy | None:
        """Start the copy of the storage of a tensor of ``stream`` to the host, or return ``None``: there is no room.

        The copy is complete at its event ``copied``; until then the source is held.
        """
        storage = tensor.untyped_storage()
        pieces = self.pool.take(storage.nbytes())
        if pieces is None:
            return None
        try:
            out, _ = self._side_streams()
            self._order_after(out, stream, Site.SOURCE_WRITTEN)
            with self.watch(TO_HOST, out):
                for part, host in self._pair(all_bytes(storage), pieces):
                    self.device.copy(host, part, out)
            copied = self._new_event()
            self.device.record(copied, out)
            copy = HostCopy(tensor, pieces, stream, copied)
        except BaseException:
            self.pool.give(pieces)
            raise
        copy.source = self.device.hold(tensor.detach(), Site.SOURCE_HELD)
        return copy

    def start_in(self, copy: HostCopy, stream: Stream) -> Tensor:
        """Start the copy back to the device, into new memory of ``stream``. It is complete at ``copy.arrived``.

        Raises:
            torch.OutOfMemoryError: There is no device memory.
        """
        destination = self.device.allocate(copy.nbytes)
        _, into = self._side_streams()
        self._order_after(into, stream, Site.DESTINATION_FREE)
        self.wait(into, copy.copied, Site.HOST_WRITTEN)
        with self.watch(TO_DEVICE, into):
            for part, host in self._pair(destination, copy.pieces):
                self.device.copy(part, host, into)
        if copy.arrived is None:
            copy.arrived = self._new_event()
        self.device.record(copy.arrived, into)
        copy.destination_stream = stream
        copy.handed = None  # what was handed before may belong to another stream
        self._count.reloaded_tensors += 1
        self._count.reloaded_bytes += copy.nbytes
        return destination

    def give_back(self, copy: HostCopy) -> None:
        """Give back the slot and the events of a copy that nobody will read again."""
        if copy.arrived is not None:
            out, _ = self._side_streams()
            self.wait(out, copy.arrived, Site.SLOT_READ)
            self._events.append(copy.arrived)
        self._events.append(copy.copied)
        self.pool.give(copy.pieces)

    def wait(self, stream: Stream, event: Event, site: Site) -> None:
        """Let later work of ``stream`` wait for ``event``."""
        self._count.waits[site.name] += 1
        computes = stream not in self._side_streams()
        with self.watch(STALLED, stream) if computes else nullcontext():
            self.device.wait(stream, event, site)

    def _order_after(self, later: Stream, earlier: Stream, site: Site) -> None:
        """Let ``later`` wait for what ``earlier`` has been given so far."""
        event = self._new_event()
        self.device.record(event, earlier)
        self.wait(later, event, site)
        self._events.append(event)

    def _side_streams(self) -> tuple[Stream, Stream]:
        if self._streams is None:
            self._streams = (self.device.new_stream(), self.device.new_stream())
        return self._streams

    def _new_event(self) -> Event:
        if self._events:
            return self._events.pop()
        self._count.events += 1
        return self.device.new_event()

    def _pair(self, flat: Tensor, pieces: list[Piece]) -> list[tuple[Tensor, Tensor]]:
        """Parts of a flat tensor with the host memory for each."""
        pairs = []
        start = 0
        for piece in pieces:
            part = flat[start : start + piece.nbytes]
            pairs.append((part, self.pool.bytes_of(piece)[: part.numel()]))
            start += piece.nbytes
        return pairs


def all_bytes(storage: torch.UntypedStorage) -> Tensor:
    """The whole of ``storage`` as a flat byte tensor."""
    return Geometry(torch.uint8, 0, (storage.nbytes(),), (1,)).place(storage)
