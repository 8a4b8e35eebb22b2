"""Copies back to the device: ahead of their time where that can be known, else when they are asked for.

Note: [Destination]
    The device memory of a tensor that comes back. It is allocated on the compute stream that will use it, so that it is
    freed there too, like any other tensor.

    - *in* writes it, after what that stream had been given at the allocation: DESTINATION_FREE.
    - It is held meanwhile: DESTINATION_HELD.
    - Before compute reads it, it waits for the event ``arrived``: ARRIVED. Before an unused one is let go, the stream
      that it was allocated on does: DROPPED_DEAD, DROPPED_EVICTED.
    - A stream that wants a tensor that was brought back for another gets a destination of its own:
      DROPPED_OTHER_STREAM.

Note: [What bounds the bytes that arrive]
    What the largest call needs, for each of the ``prefetch`` calls ahead and the one that runs.
"""

from collections import Counter

import torch
from torch import Tensor

from lightning_gacp.offload.device import Site, Stream
from lightning_gacp.offload.order import Call, Order
from lightning_gacp.offload.outbound import Outbound
from lightning_gacp.offload.records import (
    Geometry,
    HostCopy,
    Offloaded,
    Shelf,
    changed_in_place,
    storage_behind,
    weak_storage,
)
from lightning_gacp.offload.statistics import Counters, HeldStats
from lightning_gacp.offload.transfers import Transfers, all_bytes


class Inbound:
    """What is on its way back to the device, or there before it is asked for. The engine's lock guards it.

    Args:
        moves: Makes the copies.
        count: Where they are counted.
        order: Says what will be asked for next.
        out: What is still in flight needs no copy back.
        prefetch: How many calls ahead tensors are brought back.
    """

    def __init__(self, moves: Transfers, count: Counters, order: Order, out: Outbound, prefetch: int) -> None:
        self.arriving = Shelf()
        self._moves = moves
        self._count = count
        self._order = order
        self._out = out
        self._prefetch = prefetch
        self._largest_need = 0
        self._wanted: Counter[HostCopy] = Counter()

    @property
    def bound(self) -> int:
        """The most bytes that may be held before they are asked for."""
        return (self._prefetch + 1) * self._largest_need

    def stats(self) -> HeldStats:
        """What is held for somebody who will ask for it, and was."""
        return HeldStats(self.arriving.nbytes, self.arriving.peak, self.bound)

    def note_need(self, call: Call) -> None:
        """Note how many bytes the backward of ``call`` will ask for."""
        self._largest_need = max(self._largest_need, call.needed_bytes)

    def pass_by(self, call: Call) -> None:
        """Note that something of ``call`` is needed that is on the device, and bring back what comes next."""
        if self._order.visit(call, None) and self._out.live:
            self._look_ahead(call)
            self._bring_ahead(self._moves.device.current_stream())

    def serve(self, saved: Offloaded) -> Tensor:
        """Give a tensor back, ready for the current stream, and bring back what comes next.

        Raises:
            RuntimeError: It was changed in place after it was saved.
        """
        stream = self._moves.device.current_stream()
        copy, call = saved.record.copy, saved.call
        present = self._present(copy, stream)
        if present is not None and copy.arriving is None:
            self._count.served["present"] += 1
            return saved.geometry.place(present)
        another = self._order.visit(call, saved.index)
        if another:
            self._look_ahead(call)
        else:
            self._wanted[copy] -= 1
        tensor = saved.geometry.place(self._fetch(copy, saved.geometry, stream))
        if another:
            self._bring_ahead(stream)
        return tensor

    def drop(self, copy: HostCopy, site: Site) -> None:
        """Let go of a destination that nobody has used, once its stream has been told to wait for the copy."""
        assert copy.arrived is not None
        self._moves.wait(copy.destination_stream, copy.arrived, site)
        copy.arriving = None
        self.arriving.remove(copy)
        self._count.dropped_reloads += 1

    def _present(self, copy: HostCopy, stream: Stream) -> torch.UntypedStorage | None:
        """What was last given to autograd, if somebody on this stream still has it."""
        return storage_behind(copy.handed) if copy.destination_stream == stream else None

    def _fetch(self, copy: HostCopy, geometry: Geometry, stream: Stream) -> torch.UntypedStorage:
        """The storage of ``copy`` on the device, complete for ``stream``."""
        source = copy.source
        if copy.in_flight:
            same = copy.source_stream == stream
            if same and source is not None and source._version == copy.version and self._wanted[copy] > 0:
                self._count.served["in flight"] += 1
                return source.untyped_storage()  # and it stays in flight for the next who asks
            self._out.release(copy, Site.RELEASED_TO_BACKWARD if same else Site.RELEASED_TO_OTHER_STREAM)
            if same and source is not None and copy.spoiled is None:
                self._count.served["in flight"] += 1
                return source.untyped_storage()
        if copy.spoiled is not None:
            raise changed_in_place(geometry.size, geometry.dtype, copy.spoiled, copy.version)
        if copy.arriving is not None and copy.destination_stream != stream:
            self.drop(copy, Site.DROPPED_OTHER_STREAM)
        destination = copy.arriving
        if destination is not None:
            copy.arriving = None
            self.arriving.remove(copy)
            self._count.served["ahead"] += 1
        else:
            destination = self._on_demand(copy, stream)
        assert copy.arrived is not None
        self._moves.wait(stream, copy.arrived, Site.ARRIVED)
        copy.handed = weak_storage(destination.untyped_storage())
        if self._wanted[copy] > 0:
            self._expect(copy, destination)
        return destination.untyped_storage()

    def _on_demand(self, copy: HostCopy, stream: Stream) -> Tensor:
        self._count.served["on demand"] += 1
        try:
            return self._moves.start_in(copy, stream)
        except torch.OutOfMemoryError:  # then nothing must be there ahead of time
            for other in list(self.arriving.copies):
                self.drop(other, Site.DROPPED_EVICTED)
            return self._moves.start_in(copy, stream)

    def _look_ahead(self, call: Call) -> None:
        """Find what ``call`` and the calls after it will ask for, and how often, in the order of their asking."""
        calls = [call, *self._order.ahead(call, self._prefetch)]
        self._wanted = Counter(record.copy for one in calls for record in self._order.remaining(one))

    def _bring_ahead(self, stream: Stream) -> None:
        """Start reloads of what will be asked for."""
        if self._prefetch == 0:
            return
        for copy in self._wanted:
            if copy.in_flight or copy.spoiled is not None or copy.arriving is not None:
                continue
            if not self._make_room(copy.nbytes):
                return
            present = self._present(copy, stream)
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
        self.arriving.add(copy)
        self.arriving.note_peak()

    def _make_room(self, nbytes: int) -> bool:
        """Drop wrong guesses, oldest first, until ``nbytes`` more may arrive."""
        for copy in [copy for copy in self.arriving.copies if copy not in self._wanted]:
            if self.arriving.nbytes + nbytes <= self.bound:
                break
            self.drop(copy, Site.DROPPED_EVICTED)
        return self.arriving.nbytes + nbytes <= self.bound
