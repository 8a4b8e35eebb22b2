"""What the engine has done, in numbers."""

from collections import Counter
from typing import NamedTuple, TypedDict


class Stats(TypedDict):
    """Figures of an engine since it was made. Sizes are bytes.

    There are no times among them: to take one costs two events for each copy and each wait. `OffloadEngine.time_with`
    switches that on, as `GACPMonitor` does, whose report has the time of the copies and what was waited for them.
    """

    active: bool
    """Whether there is a device to offload from."""
    offloaded_tensors: int
    """Copies from the device to the host."""
    offloaded_bytes: int
    reloaded_tensors: int
    """Copies back."""
    reloaded_bytes: int
    reused_tensors: int
    """Saved tensors that were on the host already: masks, an activation that two operations save."""
    reused_bytes: int
    kept_tensors: dict[str, int]
    """Saved tensors that stayed on the device, by the reason."""
    kept_bytes: dict[str, int]
    served: dict[str, int]
    """How saved tensors came back: `ahead` of time, `on demand`, still `in flight`, or `present` on the device."""
    dropped_reloads: int
    """Reloads that nobody used."""
    waits: dict[str, int]
    """Waits that were issued, by the name of their site. The host waits for none of them."""
    in_flight_bytes: int
    """Sources that are held on the device until their copy is over."""
    peak_in_flight_bytes: int
    in_flight_bound_bytes: int
    """The most that a single call has moved."""
    arriving_bytes: int
    """What is on the device again and held for somebody who will ask for it."""
    peak_arriving_bytes: int
    arriving_bound_bytes: int
    """The most that a single call needs, times `prefetch` + 1."""
    live_records: int
    """Tensors that are on the host for a graph that is alive."""
    host_bytes: int
    """Pinned memory that is allocated."""
    host_used_bytes: int
    peak_host_used_bytes: int
    host_cap_bytes: int | None
    """`None` until something was offloaded."""
    host_slabs: int
    """Allocations of pinned memory."""
    streams: int
    events: int
    """Events that were made. They are used again and again."""


class HostStats(NamedTuple):
    """Figures of the host memory, in bytes."""

    total: int = 0
    used: int = 0
    peak_used: int = 0
    cap: int | None = None
    slabs: int = 0


class HeldStats(NamedTuple):
    """Bytes of tensors that are held on the device for a while, the most there were, and the most there may be."""

    nbytes: int = 0
    peak: int = 0
    bound: int = 0


_NO_HOST_MEMORY, _NOTHING_HELD = HostStats(), HeldStats()


class Counters:
    """What is counted while the engine runs."""

    def __init__(self) -> None:
        self.offloaded_tensors = 0
        self.offloaded_bytes = 0
        self.reloaded_tensors = 0
        self.reloaded_bytes = 0
        self.reused_tensors = 0
        self.reused_bytes = 0
        self.kept_tensors: Counter[str] = Counter()
        self.kept_bytes: Counter[str] = Counter()
        self.served: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.dropped_reloads = 0
        self.events = 0

    def report(
        self,
        *,
        active: bool,
        in_flight: HeldStats = _NOTHING_HELD,
        arriving: HeldStats = _NOTHING_HELD,
        live_records: int = 0,
        host: HostStats = _NO_HOST_MEMORY,
        streams: int = 0,
    ) -> Stats:
        """Put the counts and what holds at this moment together."""
        return {
            "active": active,
            "offloaded_tensors": self.offloaded_tensors,
            "offloaded_bytes": self.offloaded_bytes,
            "reloaded_tensors": self.reloaded_tensors,
            "reloaded_bytes": self.reloaded_bytes,
            "reused_tensors": self.reused_tensors,
            "reused_bytes": self.reused_bytes,
            "kept_tensors": dict(self.kept_tensors),
            "kept_bytes": dict(self.kept_bytes),
            "served": dict(self.served),
            "dropped_reloads": self.dropped_reloads,
            "waits": dict(self.waits),
            "in_flight_bytes": in_flight.nbytes,
            "peak_in_flight_bytes": in_flight.peak,
            "in_flight_bound_bytes": in_flight.bound,
            "arriving_bytes": arriving.nbytes,
            "peak_arriving_bytes": arriving.peak,
            "arriving_bound_bytes": arriving.bound,
            "live_records": live_records,
            "host_bytes": host.total,
            "host_used_bytes": host.used,
            "peak_host_used_bytes": host.peak_used,
            "host_cap_bytes": host.cap,
            "host_slabs": host.slabs,
            "streams": streams,
            "events": self.events,
        }
