"""The engine: takes what autograd saves, gives it back when it is needed, and notices when it never will be.

Note: [Who may touch which buffer when]
    Three kinds of memory, each touched by at most two streams at a time. Each change of hands is ordered by an event
    that is waited for *by a stream*, never by the host. The names in capitals are those of `Site`.

    - *Source*, what was saved: compute writes and frees it, *out* reads it. See [Source] in `outbound`.
    - *Slot*, pinned memory of the host: *out* writes it, *in* reads it. See [Slot] in `transfers`.
    - *Destination*, what comes back: *in* writes it, compute reads and frees it. See [Destination] in `inbound`.

Note: [One lock]
    Backward runs in threads of its own, several at once. All that is in `outbound`, `inbound`, `order` and `transfers`
    is only touched under the engine's lock. Our own finaliser needs no lock: see [Finalisers only append] in `records`.

    Inside the engine the collector, or a signal, may run code of the application in the same thread. The lock is
    reentrant, so this code may ask for `stats()` or take the offload off. But at that moment nothing here is in order:
    a forward or a backward of an offloaded block is refused then, and what dead graphs have left is given back later.
    (It must not wait for a backward in another thread, such as that of a GPU, which waits for the lock.)
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_gacp.offload.device import Device, Site
from lightning_gacp.offload.host import default_cap
from lightning_gacp.offload.inbound import Inbound
from lightning_gacp.offload.order import Call, Order
from lightning_gacp.offload.outbound import Outbound
from lightning_gacp.offload.records import Geometry, HostCopy, Kept, Offloaded, changed_in_place, size_of
from lightning_gacp.offload.statistics import Counters, Stats
from lightning_gacp.offload.transfers import Transfers
from lightning_gacp.watching import Watch

_INTERRUPTED = (
    "A finaliser or a signal handler has interrupted activation offload and uses an offloaded model. What is under way "
    "would be spoiled. Let the finaliser or the handler only make a note, and use the model later."
)


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
        self._lock = threading.RLock()
        self._inside = False
        self._graveyard: deque[HostCopy] = deque()
        self._order = Order()
        self._count = Counters()
        self._moves: Transfers | None = None
        if device is not None:
            cap: Callable[[], int] = default_cap if max_host_bytes is None else lambda: max_host_bytes
            self._moves = Transfers(device, self._count, cap)
            self._out = Outbound(self._moves, self._count, self._graveyard)
            self._in = Inbound(self._moves, self._count, self._order, self._out, prefetch)

    @property
    def active(self) -> bool:
        """Whether there is a device to offload from."""
        return self.device is not None

    def time_with(self, watch: Watch) -> None:
        """Let ``watch`` time the copies, and what the stream that computes waits for them."""
        if self._moves is not None:
            self._moves.watch = watch

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadEngine":
        """A copy of a model shares the engine: streams and pinned memory are the process's, not the model's."""
        return self

    def begin(self, block: int) -> Call:
        """Start a call of block number ``block``, whose saved tensors will be packed."""
        with self._alone():
            return self._order.begin(self, block)

    def pack(self, call: Call, tensor: Tensor, keep_because: str | None) -> Kept | Offloaded:
        """Take a tensor that autograd saves, and return what autograd holds in its place.

        Args:
            call: The call of a block that saves it.
            tensor: Is not held in any form that the graph could own.
            keep_because: Why it has to stay on the device, or ``None`` to move it.
        """
        with self._alone(), torch.no_grad():
            if keep_because is None:
                record = self._out.record_of(call, tensor)
                if record is not None:
                    call.needs(record.copy)
                    self._in.note_need(call)
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
        with self._alone(), torch.no_grad():
            if isinstance(saved, Offloaded):
                return self._in.serve(saved)
            tensor, version = saved.tensor, saved.tensor._version
            if version != saved.version:
                raise changed_in_place(tuple(tensor.shape), tensor.dtype, version, saved.version)
            self._in.pass_by(saved.call)
            return tensor

    def drain(self) -> None:
        """Give back what dead graphs have left. Called at every pack and unpack, and by whoever wants it sooner."""
        with self._lock:
            if not self._inside:
                with self._alone():
                    pass

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock, after what dead graphs have left is given back.

        Raises:
            RuntimeError: This thread is inside the engine already.
        """
        with self._lock:
            if self._inside:
                raise RuntimeError(_INTERRUPTED)
            try:
                self._inside = True
                while self._graveyard:
                    copy = self._graveyard.popleft()
                    if copy in self._in.arriving.copies:
                        self._in.drop(copy, Site.DROPPED_DEAD)
                    self._out.bury(copy)
                yield
            finally:
                self._inside = False

    def __del__(self) -> None:
        """Let nothing go before its copy is over. Nobody else can be inside the engine now, so this needs no lock."""
        if sys.is_finalizing() or getattr(self, "_in", None) is None:
            return
        for copy in list(self._out.in_flight.copies):
            self._out.release(copy, Site.RELEASED_DEAD)
        for copy in list(self._in.arriving.copies):
            self._in.drop(copy, Site.DROPPED_DEAD)

    def stats(self) -> Stats:
        """What was done so far."""
        with self._lock:
            self.drain()
            if self._moves is None:
                return self._count.report(active=False)
            return self._count.report(
                active=True,
                in_flight=self._out.stats(),
                arriving=self._in.stats(),
                live_records=self._out.live,
                host=self._moves.pool.stats(),
                streams=self._moves.streams,
            )
