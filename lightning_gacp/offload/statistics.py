"""What the engine has done, in numbers."""

from collections import Counter
from typing import TypedDict


class Stats(TypedDict):
    """Figures of an engine since it was made. Sizes are bytes."""

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
    """What a single call has moved at most, which is the bound of what is in flight."""
    arriving_bytes: int
    """Tensors that were brought back ahead of time and are not used yet."""
    peak_arriving_bytes: int
    arriving_bound_bytes: int
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
        self.peak_in_flight_bytes = 0
        self.peak_arriving_bytes = 0
        self.events = 0
