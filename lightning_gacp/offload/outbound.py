"""Copies to the host: what is copied already, what is still in flight, and when a source may be let go.

Note: [Source]
    The device memory of a saved tensor. It belongs to compute, the stream that was current when it was packed.

    - *out* reads it, after what compute had been given by then: SOURCE_WRITTEN.
    - It is held meanwhile: SOURCE_HELD. What compute allocates next may get the same memory, so before it is let go
      compute waits for the event ``copied``: RELEASED_AT_BOUND, RELEASED_TO_BACKWARD, RELEASED_DEAD; and
      RELEASED_TO_OTHER_STREAM, where the stream that needs the tensor is not the one it belongs to.
    - An in-place change while it is held is found by its version. Then the copy is spoiled.

Note: [What bounds the bytes in flight]
    What the largest call of a block has moved. So a source waits for the whole next block to be computed before compute
    waits for its copy.
"""

from collections import deque
from weakref import ref

from torch import Tensor

from lightning_gacp.offload.device import Site, Stream
from lightning_gacp.offload.order import Call
from lightning_gacp.offload.pool import tell_full
from lightning_gacp.offload.records import HostCopy, Record, Shelf, root_of
from lightning_gacp.offload.statistics import Counters, HeldStats
from lightning_gacp.offload.transfers import Transfers


class Outbound:
    """What is on its way to the host, and what is there. The engine's lock guards it.

    Args:
        moves: Makes the copies.
        count: Where they are counted.
        graveyard: Where records put their copies when they die.
    """

    def __init__(self, moves: Transfers, count: Counters, graveyard: "deque[HostCopy]") -> None:
        self.in_flight = Shelf()
        self.live = 0
        """Copies whose records are alive."""
        self._moves = moves
        self._count = count
        self._graveyard = graveyard
        self._known: dict[int, ref[Record]] = {}
        self._largest_move = 0
        self._told_full = False

    @property
    def bound(self) -> int:
        """The most bytes that may be in flight."""
        return self._largest_move

    def stats(self) -> HeldStats:
        """What is in flight and was."""
        return HeldStats(self.in_flight.nbytes, self.in_flight.peak, self.bound)

    def record_of(self, call: Call, tensor: Tensor) -> Record | None:
        """A record that stands for the storage of ``tensor`` as it is now, or ``None``: there is no host memory."""
        return self._find(tensor) or self._start(call, tensor, self._moves.device.current_stream())

    def release(self, copy: HostCopy, site: Site) -> None:
        """Let go of a source, once its stream has been told to wait for the copy."""
        self._moves.wait(copy.source_stream, copy.copied, site)
        if copy.source is not None and copy.source._version != copy.version:
            copy.spoiled = copy.source._version
        copy.source = None
        copy.in_flight = False
        self.in_flight.remove(copy)

    def bury(self, copy: HostCopy) -> None:
        """Give back what is left of a copy whose record has died. What was brought back of it must be gone already."""
        if copy.in_flight:
            self.release(copy, Site.RELEASED_DEAD)
        self._moves.give_back(copy)
        known = self._known.get(copy.address)
        if known is not None and known() is None:
            del self._known[copy.address]
        self.live -= 1

    def _find(self, tensor: Tensor) -> Record | None:
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

    def _start(self, call: Call, tensor: Tensor, stream: Stream) -> Record | None:
        """Start the copy of ``tensor`` to the host, and let go of the oldest that exceed the bound."""
        copy = self._moves.start_out(tensor, stream)
        if copy is None:
            if not self._told_full:
                self._told_full = True
                tell_full(self._moves.pool)
            return None
        self.in_flight.add(copy)
        call.moved_bytes += copy.nbytes
        self._largest_move = max(self._largest_move, call.moved_bytes)
        while self.in_flight.nbytes > self.bound:
            self.release(self.in_flight.oldest(), Site.RELEASED_AT_BOUND)
        self.in_flight.note_peak()
        self._count.offloaded_tensors += 1
        self._count.offloaded_bytes += copy.nbytes
        self.live += 1
        record = Record(copy, self._graveyard)
        self._known[copy.address] = ref(record)
        return record
