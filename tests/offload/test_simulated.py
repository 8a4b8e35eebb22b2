"""The simulated device sees what it says it sees: each rule with the smallest program that breaks it."""

from __future__ import annotations

import pytest
import torch

from lightning_gacp.offload.device import Site

from .simulated import SimulatedDevice, SimulatedStream

SEEDS = range(8)


class Rig:
    """A device with one side stream and the copy of one tensor, with or without the waits around it."""

    def __init__(self, seed: int) -> None:
        self.device = SimulatedDevice(seed)
        self.side = self.device.new_stream()
        self.compute = self.device.default_stream
        self.slab = self.device.allocate_host(16)

    def order(self, later: SimulatedStream, earlier: SimulatedStream) -> None:
        self.device.order(later, earlier)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_complete_program_is_clean(seed: int) -> None:
    rig = Rig(seed)
    with rig.device:
        source = torch.full((4,), 3.0)
        rig.order(rig.side, rig.compute)
        rig.device.copy(rig.slab, as_bytes(source), rig.side)
        rig.order(rig.compute, rig.side)
        del source
        back = rig.device.allocate(16)
        rig.order(rig.side, rig.compute)
        rig.device.copy(back, rig.slab, rig.side)
        rig.order(rig.compute, rig.side)
        assert torch.equal(back.view(torch.float32) * 2, torch.full((4,), 6.0))
        del back
    rig.device.finish()
    assert rig.device.races == []


def test_rule_1_the_result_of_a_copy_is_there_at_some_time_before_it_is_waited_for() -> None:
    seen = set()
    for seed in range(40):
        rig = Rig(seed)
        with rig.device:
            source = torch.full((4,), 3.0)
            rig.order(rig.side, rig.compute)
            rig.device.copy(rig.slab, as_bytes(source), rig.side)
            source * 2
            with rig.device._silent():
                seen.add(rig.slab.view(torch.float32)[0].item() == 3.0)
    assert seen == {True, False}


@pytest.mark.parametrize("seed", SEEDS)
def test_rules_2_and_3_the_order_of_the_program_orders_no_streams(seed: int) -> None:
    rig = Rig(seed)
    with rig.device:
        source = torch.full((4,), 3.0)
        rig.device.copy(rig.slab, as_bytes(source), rig.side)
    assert len(rig.device.races) == 1
    assert "the copy out reading on stream 1 is not ordered after aten.full" in rig.device.races[0]


def test_rule_2_the_stream_is_the_one_that_is_current_at_the_operation() -> None:
    device = SimulatedDevice()
    with device:
        made = torch.ones(4)
        with device.on(device.compute_stream()):
            made * 2
    assert len(device.races) == 1


def test_rule_3_a_stream_that_waits_for_itself_waits_for_nothing() -> None:
    rig = Rig(0)
    with rig.device:
        source = torch.full((4,), 3.0)
        rig.order(rig.side, rig.side)
        rig.device.copy(rig.slab, as_bytes(source), rig.side)
    assert len(rig.device.races) == 1


def test_rule_3_an_event_stands_for_what_it_marked_when_the_wait_was_issued() -> None:
    rig = Rig(0)
    event = rig.device.new_event()
    with rig.device:
        source = torch.full((4,), 3.0)
        rig.device.record(event, rig.compute)
        source.add_(1)
        rig.device.wait(rig.side, event, Site.SOURCE_WRITTEN)
        rig.device.copy(rig.slab, as_bytes(source), rig.side)
    assert len(rig.device.races) == 1


def test_rule_4_a_copy_whose_source_is_gone_delivers_poison() -> None:
    found = []
    for seed in range(20):
        rig = Rig(seed)
        rig.device._eagerness = 0.0
        with rig.device:
            source = torch.full((4,), 3.0)
            rig.order(rig.side, rig.compute)
            rig.device.copy(rig.slab, as_bytes(source), rig.side)
            del source
            rig.order(rig.compute, rig.side)
        found.append(rig.slab.view(torch.float32).isnan().all().item())
    assert found == [True] * 20


@pytest.mark.parametrize("seed", SEEDS)
def test_rule_5_memory_must_outlive_its_last_reader(seed: int) -> None:
    rig = Rig(seed)
    with rig.device:
        source = torch.full((4,), 3.0)
        rig.order(rig.side, rig.compute)
        rig.device.copy(rig.slab, as_bytes(source), rig.side)
        del source
        torch.ones(4)
    rig.device.finish()
    assert ["reuse of the memory of aten.full" in race for race in rig.device.races] == [True]


def test_rule_6_new_memory_is_nan() -> None:
    rig = Rig(0)
    with rig.device:
        made = rig.device.allocate(16)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        assert made.view(dtype).isnan().all() and rig.slab.view(dtype).isnan().all()


def test_rule_7_slots_of_one_slab_are_apart_and_one_slot_is_not() -> None:
    rig = Rig(0)
    other = rig.device.new_stream()
    with rig.device:
        source = torch.full((2,), 3.0)
        rig.order(rig.side, rig.compute)
        rig.order(other, rig.compute)
        rig.device.copy(rig.slab[:8], as_bytes(source), rig.side)
        rig.device.copy(rig.slab[8:], as_bytes(source), other)
        assert rig.device.races == []
        rig.device.copy(rig.slab[4:12], as_bytes(source), other)
    assert len(rig.device.races) == 1


def test_rule_8_pinned_memory_is_refused_beyond_what_there_is() -> None:
    device = SimulatedDevice(host_bytes=100)
    device.allocate_host(64)
    with pytest.raises(RuntimeError, match="out of memory"):
        device.allocate_host(64)
