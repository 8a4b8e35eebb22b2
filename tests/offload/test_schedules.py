"""Every schedule gives the gradients of the plain model, and every wait and keep-alive of the engine is needed."""

from __future__ import annotations

import pytest

from lightning_gacp.offload.device import Site

from .workloads import WORKLOADS, run

# 204 schedules here; `benchmarks/offload_schedules.py` runs 10,000.
SEEDS = 17

# Where each site is missed soonest. `benchmarks/offload_mutations.py` prints the whole table.
EXPOSED_BY = {
    Site.SOURCE_WRITTEN: "train LoRA",
    Site.SOURCE_HELD: "train LoRA",
    Site.RELEASED_AT_BOUND: "train LoRA",
    Site.RELEASED_TO_BACKWARD: "train LoRA",
    Site.RELEASED_TO_OTHER_STREAM: "backward_changes_stream",
    Site.RELEASED_DEAD: "forward_only",
    Site.DESTINATION_FREE: "train LoRA",
    Site.DESTINATION_HELD: "forward_only",
    Site.HOST_WRITTEN: "backward_changes_stream",
    Site.ARRIVED: "train LoRA",
    Site.DROPPED_DEAD: "forward_only",
    Site.DROPPED_EVICTED: "two_streams",
    Site.DROPPED_OTHER_STREAM: "backward_changes_stream",
    Site.SLOT_READ: "two_streams",
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_gradients_are_bit_equal_and_every_access_is_ordered(name: str) -> None:
    assert {seed: problems for seed in range(SEEDS) if (problems := run(name, seed))} == {}


@pytest.mark.parametrize("site", Site, ids=lambda site: site.name)
def test_each_wait_and_keep_alive_is_missed(site: Site) -> None:
    assert any(run(EXPOSED_BY[site], seed, frozenset({site})) for seed in range(6))
