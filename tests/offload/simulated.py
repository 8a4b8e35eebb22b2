"""A device that does not exist, made to break the offload engine.

Its memory is that of the CPU, so gradients can be compared bit for bit with those of the plain model. What it
adds are the rules of a real device that code gets wrong. For each, a bug that it would have caught:

1. *A copy runs at any time* between its issue and the moment an event forces it, and no earlier than the waits before
   it in its stream allow. The scheduler decides by its seed: at once, as late as can be, or at random. Work on a
   compute stream runs when it is issued. (huggingface/diffusers#13502: the consumer did not wait for the transfer
   stream.)
2. *Every access is an access of the stream it is issued on*: what an operation reads and writes belongs to the stream
   that is current then. (huggingface/trl#7195: saved tensors were cloned on the side stream, and the compute stream
   was asked for once, at construction.)
3. *A wait covers what the event had marked when the wait was issued*, and nothing else orders streams, the order of
   the program least of all. (pytorch/torchtitan#2581: the current stream was asked for inside the side stream's
   context, so a stream waited for itself.)
4. *A copy keeps no memory alive*: it knows its storages weakly, and when the source is gone it delivers poison.
   (pytorch/torchtune#1936: a tensor was let go while another stream was not done with it.)
5. *Memory belongs to the stream it was allocated on.* When it dies, that stream may overwrite it at once, so its death
   is a write of that stream. (pytorch/torchtune#1867: gradients became NaN because memory was reused while compute
   still read it; pytorch/pytorch#106360: the destination of a reload was allocated on the copy stream.)
6. *New memory is poison*, on the device and on the host: NaN in every floating-point format. (deepspeedai/DeepSpeed
   #8282: what had been emptied before was used in the recomputation without being filled.)
7. *Host memory is tracked by bytes*, so two tensors in the same slab do not disturb each other, and two in the same
   slot must be ordered. (pytorch/torchtitan#2581 again: a slot was overwritten while it was being read.)
8. *Pinned memory may be refused.* (unslothai/unsloth-zoo#1257: exhausted pinned memory looked like an out-of-memory of
   the device.)

Rules 2, 3, 5 and 7 are checked by vector clocks at the issue, so a race is found under every schedule; 1, 4 and 6 make
it visible in the numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gacp.offload.device import Device, Site

from .clocks import Clocks

POISON = 255


class Mark(NamedTuple):
    """A place in the queue of a stream."""

    stream: SimulatedStream
    position: int


class SimulatedStream:
    """A queue. ``immediate`` ones, on which the model computes, never hold anything back."""

    def __init__(self, number: int, immediate: bool) -> None:
        self.number = number
        self.immediate = immediate
        self.queue: deque[Mark | Callable[[], None]] = deque()
        self.issued = 0
        self.done = 0

    def __repr__(self) -> str:
        return f"<stream {self.number}>"


class SimulatedEvent:
    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.clock: list[int] = []


class Bytes(NamedTuple):
    """A range of a storage, which it does not keep alive."""

    storage: StorageWeakRef
    start: int
    nbytes: int

    @classmethod
    def of(cls, flat: Tensor) -> Bytes:
        assert flat.dtype is torch.uint8 and flat.is_contiguous() and flat.dim() == 1
        return cls(StorageWeakRef(flat.untyped_storage()), flat.storage_offset(), flat.numel())

    def tensor(self) -> Tensor | None:
        if self.storage.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=torch.uint8).set_(storage, self.start, (self.nbytes,))


class Area(NamedTuple):
    """Device memory that is alive, as far as is known. Weights and inputs, made before, belong to no stream."""

    storage: StorageWeakRef
    owner: SimulatedStream | None
    nbytes: int
    what: str


class SimulatedDevice(TorchDispatchMode):
    """The device protocol of the engine over CPU tensors. Enter it as a context around what computes on the device.

    Args:
        seed: Of the scheduler.
        disabled: Waits and keep-alives that do nothing, for the mutation tests.
        host_bytes: Pinned memory there is. More is refused.
        device_bytes: Bytes of reload destinations there is room for at a time. More is out of memory.
    """

    def __init__(
        self,
        seed: int = 0,
        disabled: frozenset[Site] = frozenset(),
        host_bytes: int | None = None,
        device_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.clocks = Clocks()
        self.disabled = disabled
        self.host_bytes = host_bytes
        self.device_bytes = device_bytes
        self.streams: list[SimulatedStream] = []
        self.events = 0
        self.copies: list[tuple[str, int]] = []
        """Direction and bytes of each copy, in the order of issue."""
        self._random = random.Random(seed)
        self._eagerness = self._random.choice((0.0, 0.1, 0.5, 1.0))
        self._areas: dict[int, Area] = {}
        self._host: dict[int, StorageWeakRef] = {}
        self._foreign: list[StorageWeakRef] = []
        self._schemas: dict[Any, list[tuple[int | str, bool]] | None] = {}
        self._quiet = False
        self._current = threading.local()
        self.default_stream = self.compute_stream()

    # What a test does

    @property
    def races(self) -> list[str]:
        """Accesses that no event orders."""
        return self.clocks.races

    @property
    def back_end(self) -> Device:
        """What the engine is given."""
        return self

    def compute_stream(self) -> SimulatedStream:
        """A stream that a model may compute on."""
        stream = SimulatedStream(self.clocks.new_stream(), immediate=True)
        self.streams.append(stream)
        return stream

    @contextlib.contextmanager
    def on(self, stream: SimulatedStream) -> Iterator[None]:
        """Compute on ``stream``."""
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def order(self, later: SimulatedStream, earlier: SimulatedStream) -> None:
        """What a careful user writes between two compute streams: ``later.wait_stream(earlier)``."""
        event = SimulatedEvent()
        self.record(event, earlier)
        self._wait(later, event)

    def elsewhere(self, tensor: Tensor) -> Tensor:
        """Let ``tensor`` be on the host or on another device."""
        self._foreign.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def finish(self) -> None:
        """Run everything that was issued."""
        for stream in self.streams:
            self._run_until(Mark(stream, stream.issued))
        self._notice_deaths()

    # The protocol

    def owns(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return storage not in self._host and all(ref.cdata != storage for ref in self._foreign)

    def current_stream(self) -> SimulatedStream:
        return getattr(self._current, "stream", self.default_stream)

    def capturing(self) -> bool:
        return False

    def new_stream(self) -> SimulatedStream:
        stream = SimulatedStream(self.clocks.new_stream(), immediate=False)
        self.streams.append(stream)
        return stream

    def new_event(self) -> SimulatedEvent:
        self.events += 1
        return SimulatedEvent()

    def record(self, event: SimulatedEvent, stream: SimulatedStream) -> None:
        self._step()
        event.mark = Mark(stream, stream.issued)
        event.clock = self.clocks.snapshot(stream.number)

    def wait(self, stream: SimulatedStream, event: SimulatedEvent, site: Site) -> None:
        if site not in self.disabled:
            self._wait(stream, event)

    def hold(self, tensor: Tensor, site: Site) -> Tensor | None:
        return None if site in self.disabled else tensor

    def copy(self, destination: Tensor, source: Tensor, stream: SimulatedStream) -> None:
        self._step()
        to, of = Bytes.of(destination), Bytes.of(source)
        assert to.nbytes == of.nbytes and not stream.immediate
        way = "out" if to.storage.cdata in self._host else "in"
        self.copies.append((way, to.nbytes))
        for memory, write in ((of, False), (to, True)):
            area = memory.storage.cdata
            if area not in self._host and area not in self._areas:
                self._register(memory.storage, area, None, "memory from before")
            what = f"the copy {way} {'writing' if write else 'reading'}"
            self.clocks.access(stream.number, area, memory.start, memory.start + memory.nbytes, write, what)
        stream.queue.append(lambda: self._run_copy(to, of))
        stream.issued += 1
        self._step()

    def allocate(self, nbytes: int) -> Tensor:
        self._step()
        if self.device_bytes is not None:
            held = sum(area.nbytes for area in self._areas.values() if area.what == "a destination")
            if held + nbytes > self.device_bytes:
                raise torch.OutOfMemoryError("simulated device is out of memory")
        with self._silent():
            tensor = torch.full((nbytes,), POISON, dtype=torch.uint8)
        storage, stream = tensor.untyped_storage(), self.current_stream()
        self._register(StorageWeakRef(storage), storage._cdata, stream, "a destination")
        self.clocks.access(stream.number, storage._cdata, 0, nbytes, True, "allocation of a destination")
        return tensor

    def allocate_host(self, nbytes: int) -> Tensor:
        if self.host_bytes is not None and nbytes > self.host_bytes:
            raise RuntimeError("CUDA error: out of memory")
        with self._silent():
            slab = torch.full((nbytes,), POISON, dtype=torch.uint8)
        if self.host_bytes is not None:
            self.host_bytes -= nbytes
        self._host[slab.untyped_storage()._cdata] = StorageWeakRef(slab.untyped_storage())
        return slab

    # Operations of the model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        self._step(0.1)
        result = func(*args, **kwargs)
        schema = self._schema(func)
        if schema is None:
            return result
        known = set()
        stream = self.current_stream()
        for place, write in schema:
            value = kwargs.get(place) if isinstance(place, str) else (args[place] if place < len(args) else None)
            for tensor in _tensors(value):
                known.add(tensor.untyped_storage()._cdata)
                self._touch(tensor, stream, None, write, str(func))
        for tensor in _tensors(result):
            if tensor.untyped_storage()._cdata not in known:
                self._touch(tensor, stream, stream, True, str(func))
        return result

    def _schema(self, func: Any) -> list[tuple[int | str, bool]] | None:
        """Which arguments an operation reads and writes; ``None`` for a view, which touches nothing."""
        if func not in self._schemas:
            schema = func._schema
            returns = [value.alias_info for value in schema.returns if value.alias_info is not None]
            if any(not alias.is_write for alias in returns) or schema.name in ("aten::set_", "aten::empty"):
                self._schemas[func] = None
            else:
                self._schemas[func] = [
                    (
                        argument.name if argument.kwarg_only else place,
                        bool(argument.alias_info and argument.alias_info.is_write),
                    )
                    for place, argument in enumerate(schema.arguments)
                ]
        return self._schemas[func]

    def _touch(
        self, tensor: Tensor, stream: SimulatedStream, owner: SimulatedStream | None, write: bool, what: str
    ) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._host or not self.owns(tensor):
            return
        if storage._cdata not in self._areas:
            self._register(StorageWeakRef(storage), storage._cdata, owner, what)
        self.clocks.access(stream.number, storage._cdata, 0, storage.nbytes(), write, what)

    # Memory

    def _register(self, storage: StorageWeakRef, address: int, owner: SimulatedStream | None, what: str) -> None:
        nbytes = torch.UntypedStorage._new_with_weak_ptr(address).nbytes()
        self._areas[address] = Area(storage, owner, nbytes, what)

    def _notice_deaths(self) -> None:
        """Called before anything that changes what a stream knows: the owner's clock is that of the death."""
        for address, area in list(self._areas.items()):
            if area.storage.expired():
                owner = None if area.owner is None else area.owner.number
                self.clocks.death(owner, address, area.nbytes, f"the memory of {area.what}")
                del self._areas[address]

    @contextlib.contextmanager
    def _silent(self) -> Iterator[None]:
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    # The scheduler

    def _wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        self._step()
        if event.mark is None:
            return
        self.clocks.merge(stream.number, event.clock)
        if stream.immediate:
            self._run_until(event.mark)
        else:
            stream.queue.append(event.mark)
            stream.issued += 1

    def _step(self, less_often: float = 1.0) -> None:
        """Something happens: memory may have died, and the device may have got on with its work."""
        if less_often == 1.0:
            self._notice_deaths()
        for stream in self.streams:
            while stream.queue and self._random.random() < self._eagerness * less_often:
                head = stream.queue[0]
                if isinstance(head, Mark) and head.stream.done < head.position:
                    break
                self._run_head(stream)

    def _run_until(self, mark: Mark) -> None:
        while mark.stream.done < mark.position:
            head = mark.stream.queue[0]
            if isinstance(head, Mark):
                self._run_until(head)
            self._run_head(mark.stream)

    def _run_head(self, stream: SimulatedStream) -> None:
        head = stream.queue.popleft()
        if not isinstance(head, Mark):
            head()
        stream.done += 1

    def _run_copy(self, to: Bytes, of: Bytes) -> None:
        with self._silent(), torch.no_grad():
            destination, source = to.tensor(), of.tensor()
            if destination is None:
                return
            if source is None:
                destination.fill_(POISON)
            else:
                destination.copy_(source)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(_tensors, value))
