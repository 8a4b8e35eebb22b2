"""Vector clocks: which access is ordered before which, and which two are not.

Each stream counts what it does. Its clock says how far it knows each stream, itself included: everything up to there
happens before whatever it is given next. Recording an event copies the clock of its stream; waiting for it merges that
copy into the clock of the waiting stream. Two accesses to the same bytes, one of them a write, are a race when the
stream of the second did not know of the first.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class Access(NamedTuple):
    start: int
    stop: int
    stream: int
    count: int
    write: bool
    what: str


class Clocks:
    """The clocks of all streams, the accesses that a later one may still collide with, and the races found."""

    def __init__(self) -> None:
        self._known: list[list[int]] = []
        self._accesses: dict[Hashable, list[Access]] = {}
        self.races: list[str] = []

    def new_stream(self) -> int:
        """The number of a new stream, which knows of nothing."""
        for clock in self._known:
            clock.append(0)
        self._known.append([0] * (len(self._known) + 1))
        return len(self._known) - 1

    def snapshot(self, stream: int) -> list[int]:
        """What an event recorded now on ``stream`` stands for."""
        return list(self._known[stream])

    def merge(self, stream: int, snapshot: list[int]) -> None:
        """``stream`` waits for an event."""
        clock = self._known[stream]
        for other, count in enumerate(snapshot):  # streams made since are unknown to the event
            clock[other] = max(clock[other], count)

    def access(self, stream: int, memory: Hashable, start: int, stop: int, write: bool, what: str) -> None:
        """``stream`` reads or writes the bytes from ``start`` to ``stop`` of ``memory``."""
        clock = self._known[stream]
        clock[stream] += 1
        new = Access(start, stop, stream, clock[stream], write, what)
        remaining = []
        for old in self._accesses.get(memory, ()):
            overlap = old.start < stop and start < old.stop
            if overlap and (write or old.write) and clock[old.stream] < old.count:
                self.races.append(f"{what} on stream {stream} is not ordered after {old.what} on stream {old.stream}")
            # A later access that collides with `old` collides with `new` too, if `new` covers it and is no weaker.
            covered = start <= old.start and old.stop <= stop
            if not (covered and (write or (old.stream == stream and not old.write))):
                remaining.append(old)
        remaining.append(new)
        self._accesses[memory] = remaining

    def death(self, stream: int | None, memory: Hashable, nbytes: int, what: str) -> None:
        """``memory`` is given back to ``stream``, which may overwrite it from now on."""
        if stream is not None:
            self.access(stream, memory, 0, nbytes, True, f"reuse of {what}")
        self._accesses.pop(memory, None)
