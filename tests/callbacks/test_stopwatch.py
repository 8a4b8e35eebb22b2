"""The times of recomputation and transfers: counted where they are, exact on a clock of the tests, never waited for."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from offload.simulated import SimulatedDevice
from torch import nn

from lightning_gacp.callbacks import stopwatch
from lightning_gacp.callbacks.stopwatch import BlockTimes, Stopwatch
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.offload import offload_blocks
from lightning_gacp.watching import RECOMPUTATION, STALLED, TO_DEVICE, TO_HOST

CPU = torch.device("cpu")


class Clock:
    """A device's clock: events are stamped when they are recorded, and passed when the test says so."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.passed = 0.0
        self.made: list[Event] = []
        self.waited = 0

    def make(self) -> Event:
        self.made.append(Event(self))
        return self.made[-1]


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self, stream: Any) -> None:
        self.stamp, self.stream = self.clock.ms, stream

    def query(self) -> bool:
        return self.stamp <= self.clock.passed

    def synchronize(self) -> None:
        self.clock.waited += 1
        self.clock.passed = max(self.clock.passed, self.stamp)

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query(), "torch refuses to time what the device has not passed"
        return other.stamp - self.stamp


def spend(watch: Stopwatch, clock: Clock, name: str, ms: float, stream: str = "s") -> None:
    with watch.span(name, stream):
        clock.ms += ms


def test_events_are_read_when_the_device_has_passed_them() -> None:
    clock = Clock()
    watch = Stopwatch(torch.device("cuda"), clock.make)
    spend(watch, clock, "a", 5)
    spend(watch, clock, "b", 7)
    spend(watch, clock, "a", 11)
    watch.collect()
    assert (watch.seconds("a"), watch.seconds("b"), watch.seconds("c")) == (0.0, 0.0, None)
    clock.passed = 12
    watch.collect()
    assert (watch.seconds("a"), watch.seconds("b")) == (0.005, 0.007)
    assert clock.waited == 0
    watch.collect(wait=True)
    assert (watch.seconds("a"), clock.waited) == (0.016, 1)


def test_a_stream_that_lags_behind_does_not_hold_up_the_others() -> None:
    clock = Clock()
    watch = Stopwatch(torch.device("cuda"), clock.make)
    spend(watch, clock, "late", 5, "side")
    clock.made[1].query = lambda: False  # type: ignore[method-assign]
    spend(watch, clock, "early", 3)
    clock.passed = 8
    watch.collect()
    assert (watch.seconds("late"), watch.seconds("early")) == (0.0, 0.003)


def test_events_are_used_again() -> None:
    """A fit of any length makes as many as are under way at a time."""
    clock = Clock()
    watch = Stopwatch(torch.device("cuda"), clock.make)
    for _ in range(50):
        spend(watch, clock, "a", 2)
        spend(watch, clock, "b", 2)
        clock.passed = clock.ms
        watch.collect()
    assert len(clock.made) == 4
    assert watch.seconds("a") == 0.1


def test_a_span_that_an_exception_leaves_counts() -> None:
    """torch ends a recomputation by one, as soon as it has what it needs."""
    clock = Clock()
    for watch in (Stopwatch(torch.device("cuda"), clock.make), Stopwatch(CPU)):
        with pytest.raises(KeyError), watch.span("a", "s"):
            clock.ms += 3
            raise KeyError
        watch.collect(wait=True)
        assert watch.seconds("a") is not None
        assert watch.seconds("a") > 0  # type: ignore[operator]


def network() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)))


def backward(net: nn.Module) -> None:
    net(torch.randn(3, 8)).sum().backward()


def test_every_recomputation_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves one second each time it is read: as many seconds as blocks were recomputed."""
    ticks = count()
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    net = network()
    with checkpoint_blocks(net, every_n_layers=2):
        times = BlockTimes(net, CPU)
        backward(net)
        assert times.watch.seconds(RECOMPUTATION) == 2
        with torch.no_grad():
            net(torch.randn(3, 8))
        assert times.watch.seconds(RECOMPUTATION) == 2
        backward(copy.deepcopy(net))
        assert times.watch.seconds(RECOMPUTATION) == 4
        times.close()
        backward(net)
        assert times.watch.seconds(RECOMPUTATION) == 4


def test_nothing_is_timed_where_nothing_is_recomputed() -> None:
    times = BlockTimes(net := network(), CPU)
    backward(net)
    assert times.watch.seconds(RECOMPUTATION) is None


def test_transfers_are_timed_on_their_streams() -> None:
    """Each copy in a span of its own side stream, each wait of the computation in one of its; gradients as without."""
    net, device = network(), SimulatedDevice(3)
    compute = device.default_stream
    seen: Counter[tuple[str, bool]] = Counter()
    inside: list[str] = []
    copied = Counter[str]()

    @contextmanager
    def watch(name: str, stream: Any) -> Iterator[None]:
        seen[name, stream == compute] += 1
        before = len(device.copies)
        inside.append(name)
        yield
        inside.pop()
        copied.update({(name, way): 1 for way, _ in device.copies[before:]})

    batch = torch.randn(3, 8)
    net(batch).sum().backward()
    expected = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    with device, offload_blocks(net, min_bytes=0, device=device) as applied:
        applied.engine.time_with(watch)
        net(batch).sum().backward()
        stats = applied.engine.stats()
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), expected, strict=True))
    # Large storages are copied in pieces, in one span.
    assert seen[TO_HOST, False] == stats["offloaded_tensors"] > 0
    assert seen[TO_DEVICE, False] == stats["reloaded_tensors"] > 0
    assert copied.keys() == {(TO_HOST, "out"), (TO_DEVICE, "in")}
    assert sum(copied.values()) == stats["offloaded_tensors"] + stats["reloaded_tensors"]
    of_compute = ("RELEASED", "ARRIVED", "DROPPED")
    stalls = sum(number for site, number in stats["waits"].items() if site.startswith(of_compute))
    assert {key: n for key, n in seen.items() if key[0] == STALLED} == {(STALLED, True): stalls}


def test_the_watch_of_an_engine_is_set_and_taken_off() -> None:
    net, device = network(), SimulatedDevice(3)
    with device, offload_blocks(net, min_bytes=0, device=device):
        clock = Clock()
        times = BlockTimes(net, CPU)
        times.watch._times, times.watch._make_event = True, clock.make
        backward(net)
        assert len(clock.made) > 0
        times.watch.collect(wait=True)
        assert times.watch.seconds(TO_HOST) == times.watch.seconds(STALLED) == 0.0
        times.close()
        made, clock.ms = len(clock.made), 1.0
        backward(net)
        assert len(clock.made) == made and times.watch.seconds(TO_HOST) == 0.0
