"""The transfer engine: moves saved tensors to the host and back on two streams of its own.

Note: [Who may touch which buffer when]
    Each memory area is touched by at most two streams at a time, and each change of hands is ordered by an event that
    is waited for *by a stream*, never by the host. The names in capitals are those of `Site`.

    *Source* (device memory of the saved tensor). Belongs to compute, the stream that was current when it was packed.
        out reads it, after what compute had been given by then (SOURCE_WRITTEN). It is held meanwhile (SOURCE_HELD),
        and before it is let go compute waits for the event ``copied`` (RELEASED_*), as what compute allocates
        next may get the same memory. An in-place change while it is held is found by its version: the copy is spoiled.

    *Slot* (pinned host memory). Belongs to out and in. out writes it once; the event ``copied`` marks the end. in reads
    it
        any number of times, each time after ``copied`` (HOST_WRITTEN); ``arrived`` marks the end of the last time. When
        the record has died, out waits for ``arrived`` (SLOT_READ), and the slot may be given to another tensor. Copies
        out need no order among themselves: they are on one stream.

    *Destination* (device memory of the tensor that comes back). Allocated on the compute stream that will use it, so it
    is
        freed there too, like any other tensor. in writes it, after what that stream had been given at the allocation
        (DESTINATION_FREE). It is held meanwhile (DESTINATION_HELD). Before compute reads it, it waits for ``arrived``
        (ARRIVED); before an unused one is let go, the stream that it was allocated on does (DROPPED_*). A stream
        that wants a tensor that was brought back for another gets a destination of its own.

Note: [What bounds device memory]
    In flight: what the largest call of a block has moved. So a source waits for the whole next block to be computed
    before compute waits for its copy. Arriving: what the largest calls need, ``prefetch`` + 1 times.
"""

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lightning_gacp.offload.device import Device, Site, Stream
from lightning_gacp.offload.host import default_cap
from lightning_gacp.offload.order import Call, Order
from lightning_gacp.offload.pool import tell_full
from lightning_gacp.offload.records import (
    Geometry,
    HostCopy,
    Kept,
    Offloaded,
    Record,
    Shelf,
    changed_in_place,
    root_of,
    size_of,
    storage_behind,
    weak_storage,
)
from lightning_gacp.offload.statistics import Counters, HostStats, Stats
from lightning_gacp.offload.transfers import Transfers, all_bytes
from lightning_gacp.watching import Watch


class OffloadEngine:
    """Moves the saved tensors of some blocks. One for each model that is offloaded; all its methods are thread-safe.

    Args:
        device: Where the tensors are, or ``None`` where there is no accelerator: then nothing is ever moved.
        max_host_bytes: Cap of the pinned memory; ``None``: what is available less a reserve, over the local ranks.
        prefetch: How many calls ahead tensors are brought back.
    """

    def __init__(
        self,
        device: Device | None,
        *,
        max_host_bytes: int | None = None,
        prefetch: int = 1,
    ) -> None:
        self.device = device
        self.prefetch = prefetch
        self._largest_move = 0
        self._largest_need = 0
        # Reentrant, because a finaliser of the application may run a backward while this thread is inside the engine.
        self._lock = threading.RLock()
        self._graveyard: deque[HostCopy] = deque()
        self._order = Order()
        self._known: dict[int, ref[Record]] = {}
        self._in_flight = Shelf()
        self._arriving = Shelf()
        self._wanted: Counter[HostCopy] = Counter()
        self._live = 0
        self._told_full = False
        self._count = Counters()
        cap: Callable[[], int] = default_cap if max_host_bytes is None else lambda: max_host_bytes
        self._transfers = None if device is None else Transfers(device, self._count, cap)

    @property
    def active(self) -> bool:
        """Whether there is a device to offload from."""
        return self.device is not None

    def time_with(self, watch: Watch) -> None:
        """Let ``watch`` time the copies, and what the stream that computes waits for them."""
        if self._transfers is not None:
            self._transfers.watch = watch

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadEngine":
        """A copy of a model shares the engine: streams and pinned memory are the process's, not the model's."""
        return self

    def begin(self, block: int) -> Call:
        """Start a call of block number ``block``, whose saved tensors will be packed."""
        with self._lock:
            self.drain()
            return self._order.begin(self, block)

    def pack(self, call: Call, tensor: Tensor, keep_because: str | None) -> Kept | Offloaded:
        """Take a tensor that autograd saves, and return what autograd holds in its place.

        Args:
            call: The call of a block that saves it.
            tensor: Is not held in any form that the graph could own.
            keep_because: Why it has to stay on the device, or ``None`` to move it.
        """
        with self._lock, torch.no_grad():
            self.drain()
            if keep_because is None:
                record = self._find_known(tensor) or self._offload(call, tensor)
                if record is not None:
                    call.needs(record.copy)
                    self._largest_need = max(self._largest_need, call.needed_bytes)
                    return Offloaded(call, record, Geometry.of(tensor))
                keep_because = "host memory is full"
            self._count.kept_tensors[keep_because] += 1
            self._count.kept_bytes[keep_because] += size_of(tensor)
            return Kept(call, tensor)

    def unpack(self, saved: Kept | Offloaded) -> Tensor:
        """Give autograd the tensor back, ready for the current stream, and bring back what it will ask for next.

        Raises:
            RuntimeError: The tensor was changed in place after it was saved, as autograd without hooks says it.
        """
        with self._lock, torch.no_grad():
            self.drain()
            if isinstance(saved, Kept):
                tensor, version = saved.tensor, saved.tensor._version
                if version != saved.version:
                    raise changed_in_place(tuple(tensor.shape), tensor.dtype, version, saved.version)
                if self._order.visit(saved.call, None) and self._live:
                    self._look_ahead(saved.call)
                    self._bring_ahead(self._moves.device.current_stream())
                return tensor
            stream = self._moves.device.current_stream()
            copy = saved.record.copy
            handed = storage_behind(copy.handed) if copy.destination_stream == stream else None
            if handed is not None and copy.arriving is None:
                self._count.served["present"] += 1
                return saved.geometry.place(handed)
            another = self._order.visit(saved.call, saved.index)
            if another:
                self._look_ahead(saved.call)
            else:
                self._wanted[copy] -= 1
            tensor = saved.geometry.place(self._fetch(copy, saved.geometry, stream))
            if another:
                self._bring_ahead(stream)
            return tensor

    def drain(self) -> None:
        """Give back what dead graphs have left. Called at every pack and unpack, and by whoever wants it sooner."""
        while self._graveyard:
            with self._lock:
                try:
                    copy = self._graveyard.popleft()
                except IndexError:  # another thread was faster
                    return
                self._bury(copy)

    def __del__(self) -> None:
        """Let nothing go before its copy is over. Nobody else can be inside the engine now, so this needs no lock."""
        if sys.is_finalizing() or getattr(self, "_transfers", None) is None:
            return
        for copy in list(self._in_flight.copies):
            self._release(copy, Site.RELEASED_DEAD)
        for copy in list(self._arriving.copies):
            self._drop(copy, Site.DROPPED_DEAD)

    def stats(self) -> Stats:
        """What was done so far."""
        with self._lock:
            self.drain()
            moves = self._transfers
            return self._count.report(
                active=self.active,
                in_flight=self._in_flight,
                in_flight_bound=self._in_flight_bound,
                arriving=self._arriving,
                arriving_bound=self._arriving_bound,
                live_records=self._live,
                host=HostStats() if moves is None else moves.pool.stats(),
                streams=0 if moves is None else moves.streams,
            )

    # Copies out

    def _find_known(self, tensor: Tensor) -> Record | None:
        """The record of a storage that is on the host already, unchanged."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        record = None if known is None else known()
        if record is None:
            return None
        copy = record.copy
        if copy.spoiled is not None or copy.version != tensor._version or copy.root() is not root_of(tensor):
            return None
        self._count.reused_tensors += 1
        self._count.reused_bytes += copy.nbytes
        return record

    def _offload(self, call: Call, tensor: Tensor) -> Record | None:
        """Start the copy of ``tensor`` to the host. ``None``: there is no room."""
        copy = self._moves.start_out(tensor, self._moves.device.current_stream())
        if copy is None:
            if not self._told_full:
                self._told_full = True
                tell_full(self._moves.pool)
            return None
        self._in_flight.add(copy)
        call.moved_bytes += copy.nbytes
        self._largest_move = max(self._largest_move, call.moved_bytes)
        while self._in_flight.nbytes > self._in_flight_bound:
            self._release(self._in_flight.oldest(), Site.RELEASED_AT_BOUND)
        self._in_flight.note_peak()
        self._count.offloaded_tensors += 1
        self._count.offloaded_bytes += copy.nbytes
        self._live += 1
        record = Record(copy, self._graveyard)
        self._known[copy.address] = ref(record)
        return record

    def _release(self, copy: HostCopy, site: Site) -> None:
        """Let go of a source, once its stream has been told to wait for the copy."""
        self._moves.wait(copy.source_stream, copy.copied, site)
        if copy.source is not None and copy.source._version != copy.version:
            copy.spoiled = copy.source._version
        copy.source = None
        copy.in_flight = False
        self._in_flight.remove(copy)

    # Copies in

    def _fetch(self, copy: HostCopy, geometry: Geometry, stream: Stream) -> torch.UntypedStorage:
        """The storage of ``copy`` on the device, complete for ``stream``."""
        source = copy.source
        if copy.in_flight:
            same = copy.source_stream == stream
            if same and source is not None and source._version == copy.version and self._wanted[copy] > 0:
                self._count.served["in flight"] += 1
                return source.untyped_storage()  # and it stays in flight for the next who asks
            self._release(copy, Site.RELEASED_TO_BACKWARD if same else Site.RELEASED_TO_OTHER_STREAM)
            if same and source is not None and copy.spoiled is None:
                self._count.served["in flight"] += 1
                return source.untyped_storage()
        if copy.spoiled is not None:
            raise changed_in_place(geometry.size, geometry.dtype, copy.spoiled, copy.version)
        if copy.arriving is not None and copy.destination_stream != stream:
            self._drop(copy, Site.DROPPED_OTHER_STREAM)
        destination = copy.arriving
        if destination is not None:
            copy.arriving = None
            self._arriving.remove(copy)
            self._count.served["ahead"] += 1
        else:
            try:
                destination = self._moves.start_in(copy, stream)
            except torch.OutOfMemoryError:  # then nothing must be there ahead of time
                for other in list(self._arriving.copies):
                    self._drop(other, Site.DROPPED_EVICTED)
                destination = self._moves.start_in(copy, stream)
            self._count.served["on demand"] += 1
        assert copy.arrived is not None
        self._moves.wait(stream, copy.arrived, Site.ARRIVED)
        copy.handed = weak_storage(destination.untyped_storage())
        if self._wanted[copy] > 0:
            self._expect(copy, destination)
        return destination.untyped_storage()

    def _look_ahead(self, call: Call) -> None:
        """Find what ``call`` and the calls after it will ask for, and how often, in the order of their asking."""
        calls = [call, *self._order.ahead(call, self.prefetch)]
        self._wanted = Counter(record.copy for one in calls for record in self._order.remaining(one))

    def _bring_ahead(self, stream: Stream) -> None:
        """Start reloads of what will be asked for."""
        if self.prefetch == 0:
            return
        for copy in self._wanted:
            if copy.in_flight or copy.spoiled is not None or copy.arriving is not None:
                continue
            if not self._make_room(copy.nbytes):
                return
            present = storage_behind(copy.handed) if copy.destination_stream == stream else None
            if present is not None:  # another call has it, and lets go of it too early
                destination = all_bytes(present)
            else:
                try:
                    destination = self._moves.start_in(copy, stream)
                except torch.OutOfMemoryError:  # it will be asked for when there is no other way
                    return
            self._expect(copy, destination)

    def _expect(self, copy: HostCopy, destination: Tensor) -> None:
        """Hold a destination for somebody who will ask for it."""
        copy.arriving = self._moves.device.hold(destination, Site.DESTINATION_HELD)
        self._arriving.add(copy)
        self._arriving.note_peak()

    def _make_room(self, nbytes: int) -> bool:
        """Drop wrong guesses, oldest first, until ``nbytes`` more may arrive."""
        for copy in [copy for copy in self._arriving.copies if copy not in self._wanted]:
            if self._arriving.nbytes + nbytes <= self._arriving_bound:
                break
            self._drop(copy, Site.DROPPED_EVICTED)
        return self._arriving.nbytes + nbytes <= self._arriving_bound

    def _drop(self, copy: HostCopy, site: Site) -> None:
        """Let go of a destination that nobody has used, once its stream has been told to wait for the copy."""
        assert copy.arrived is not None
        self._moves.wait(copy.destination_stream, copy.arrived, site)
        copy.arriving = None
        self._arriving.remove(copy)
        self._count.dropped_reloads += 1

    def _bury(self, copy: HostCopy) -> None:
        """Give back everything of a copy whose record has died."""
        if copy.in_flight:
            self._release(copy, Site.RELEASED_DEAD)
        if copy in self._arriving.copies:
            self._drop(copy, Site.DROPPED_DEAD)
        self._moves.give_back(copy)
        known = self._known.get(copy.address)
        if known is not None and known() is None:
            del self._known[copy.address]
        self._live -= 1

    # What the above is made of

    @property
    def _moves(self) -> Transfers:
        assert self._transfers is not None
        return self._transfers

    @property
    def _in_flight_bound(self) -> int:
        return self._largest_move

    @property
    def _arriving_bound(self) -> int:
        return (self.prefetch + 1) * self._largest_need
