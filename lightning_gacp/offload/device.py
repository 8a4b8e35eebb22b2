"""What the offload engine asks of a device, and the list of everything it relies on to order the streams.

There are two implementations: `AcceleratorDevice` on ``torch.accelerator``, and a simulated one in the tests that runs
copies at adversarial times and reports every access that no event orders.
"""

import enum
from typing import Any, Protocol, TypeAlias

from torch import Tensor

Stream: TypeAlias = Any
"""A queue of work on the device. Compared with ``==``."""

Event: TypeAlias = Any
"""A mark in a stream. It may be recorded again as soon as the waits for its last mark have been issued."""


class Site(enum.Enum):
    """Every wait and every keep-alive of the engine. The tests switch them off one at a time; each must be missed.

    Words: the *compute* stream is the one that is current where a tensor is saved or needed; *out* is the stream that
    copies from the device to the host, *in* the one that copies back. A *slot* is the host memory of one copy.
    """

    SOURCE_WRITTEN = "out waits for compute: the tensor must be complete before it is copied"
    SOURCE_HELD = "the source is held while it is copied: its memory must not be given to another tensor"
    RELEASED_AT_BOUND = "compute waits for the copy before the source is let go, when too much is in flight"
    RELEASED_TO_BACKWARD = "compute waits for the copy before the source is handed to the backward, which frees it"
    RELEASED_TO_OTHER_STREAM = "the source's stream waits for the copy when another stream needs the tensor"
    RELEASED_DEAD = "compute waits for the copy before the source of a dead graph is let go"
    DESTINATION_FREE = "in waits for compute: earlier work may still use the memory that the reload will fill"
    DESTINATION_HELD = "the destination is held while it is filled: nobody else knows of it yet"
    HOST_WRITTEN = "in waits for out: the host copy must be complete before it is read"
    ARRIVED = "compute waits for the reload before it uses the tensor"
    DROPPED_DEAD = "compute waits for a reload that nobody will use, because its graph died, before it is let go"
    DROPPED_EVICTED = "compute waits for a reload that was guessed wrongly before it is let go"
    DROPPED_OTHER_STREAM = "the stream a reload was made for waits for it before it is let go, when another needs it"
    SLOT_READ = "out waits for in: the last reload of a slot must be over before the slot is written again"


class Device(Protocol):
    """A device with streams. All copies are between flat byte tensors of equal length."""

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lives on this device."""

    def current_stream(self) -> Stream:
        """The stream that the calling thread computes on now."""

    def capturing(self) -> bool:
        """Whether the stream that the calling thread computes on is being captured into a graph."""

    def new_stream(self) -> Stream:
        """Make a stream of our own."""

    def new_event(self) -> Event:
        """Make an event."""

    def record(self, event: Event, stream: Stream) -> None:
        """Mark the work issued to ``stream`` so far."""

    def wait(self, stream: Stream, event: Event, site: Site) -> None:
        """Let later work of ``stream`` start only when ``event`` has been reached. The host goes on at once."""

    def hold(self, tensor: Tensor, site: Site) -> Tensor | None:
        """The reference that keeps ``tensor`` alive for work on another stream (``None`` only in tests)."""

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Issue a copy of bytes to ``stream``. The host goes on at once."""

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate device memory for the current stream, as bytes.

        Raises:
            torch.OutOfMemoryError: There is none.
        """

    def allocate_host(self, nbytes: int) -> Tensor:
        """Allocate pinned host memory, as bytes.

        Raises:
            RuntimeError: There is none.
        """
