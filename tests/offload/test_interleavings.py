"""Any interleaving of graphs, streams, threads of the collector and schedules of the device gives the same numbers."""

from __future__ import annotations

import gc
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from .simulated import SimulatedDevice
from .workloads import WORKLOADS, Graph, Stack, run

ACTIONS = st.one_of(
    st.tuples(st.just("forward"), st.integers(0, 3)),
    st.tuples(st.just("backward"), st.integers(0, 3)),
    st.tuples(st.just("again"), st.integers(0, 3)),
    st.tuples(st.just("drop"), st.integers(0, 3)),
    st.tuples(st.just("collect"), st.just(0)),
    st.tuples(st.just("ask"), st.just(0)),
)


class Interleaving:
    """Four places for graphs. What is done in one must not show in another."""

    def __init__(self, seed: int) -> None:
        self.device = SimulatedDevice(seed)
        self.stack = Stack(self.device, random.Random(seed))
        self.streams = [self.device.default_stream, self.device.compute_stream()]
        self.graphs: dict[int, tuple[Graph, Graph]] = {}
        self.made = 0

    def act(self, action: str, place: int) -> None:
        """Do something. Each place has its stream, as independent work of a careful user has."""
        with self.device, self.device.on(self.streams[place % 2]):
            if action == "forward":
                self.made += 1
                pair = self.stack.graph(self.made)
                pair[1].forward()
                self.graphs[place] = pair  # another that was there dies, begun or not
            elif action == "backward" and place in self.graphs and self.graphs[place][1].left:
                self.graphs[place][1].back()
            elif action == "again" and place in self.graphs and self.graphs[place][1].left:
                graph = self.graphs[place][1]
                points, gradient = list(graph.points), graph.gradient
                graph.back(keep=True)
                graph.points, graph.gradient = points, gradient
            elif action == "drop":
                self.graphs.pop(place, None)
            elif action == "collect":
                gc.collect(0)
            elif action == "ask":
                stats = self.stack.applied.engine.stats()
                assert stats["peak_in_flight_bytes"] <= stats["in_flight_bound_bytes"]
                assert stats["peak_arriving_bytes"] <= stats["arriving_bound_bytes"]

    def finish(self) -> None:
        for place, (plain, graph) in self.graphs.items():
            with self.device, self.device.on(self.streams[place % 2]):
                found = graph.finish()
            assert found.equal(plain.forward().finish())
        self.graphs.clear()
        self.device.finish()
        assert self.device.races == []
        stats = self.stack.applied.engine.stats()
        assert stats["live_records"] == stats["host_used_bytes"] == stats["in_flight_bytes"] == 0
        assert stats["arriving_bytes"] == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.lists(ACTIONS, max_size=25))
def test_graphs_in_any_interleaving_give_the_gradients_of_the_plain_model(seed: int, actions: list[Any]) -> None:
    interleaving = Interleaving(seed)
    for action in actions:
        interleaving.act(*action)
    interleaving.finish()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(WORKLOADS)), st.integers(20_000, 10**9))
def test_any_schedule_of_any_workload(name: str, seed: int) -> None:
    assert run(name, seed) == []
