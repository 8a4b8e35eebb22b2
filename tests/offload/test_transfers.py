"""What is moved, when, and how much memory that takes: exact counts on the simulated device."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_gacp.blocks import every_nth, find_blocks
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.offload import AppliedOffload, offload_blocks, offload_selected
from lightning_gacp.offload.device import Site
from lightning_gacp.offload.outbound import Outbound
from lightning_gacp.offload.transfers import Transfers

from .models import MODELS, Adapter, TransformerBlock, batch, build, gradients, same
from .simulated import SimulatedDevice

BATCH, SEQUENCE, WIDTH = 2, 3, 8


class Chain(nn.Module):
    """Blocks in a row, nothing else."""

    def __init__(self, depth: int = 6, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Adapter().requires_grad_() for _ in range(depth)).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def data(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, SEQUENCE, WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)


def inputs_only(model: nn.Module, device: SimulatedDevice, every: int = 1, **settings: Any) -> AppliedOffload:
    """What ``checkpoint_blocks(offload=True)`` does, on the simulated device."""
    checkpoint_blocks(model, every_n_layers=every, blocks="blocks.*")
    blocks = every_nth(find_blocks(model, "blocks.*"), every)
    return offload_selected(model, blocks, min_bytes=1, device=device, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("keep_last", [0, 1, 2])
def test_bytes_moved_are_blocks_times_batch_times_sequence_times_hidden(
    dtype: torch.dtype, every: int, keep_last: int
) -> None:
    model, device = Chain(dtype=dtype), SimulatedDevice()
    applied = inputs_only(model, device, every, keep_last=keep_last)
    with device:
        for _ in range(3):
            model(data(dtype)).sum().backward()
    moved = max(0, -(-6 // every) - keep_last)
    size = BATCH * SEQUENCE * WIDTH * dtype.itemsize
    assert device.copies.count(("out", size)) == 3 * moved == applied.engine.stats()["offloaded_tensors"]
    assert sum(nbytes for way, nbytes in device.copies if way == "out") == 3 * moved * size
    assert applied.engine.stats()["offloaded_bytes"] == 3 * moved * size


def test_sources_are_dead_after_the_forward_except_what_is_in_flight_and_kept() -> None:
    model, device = Chain(), SimulatedDevice()
    applied = inputs_only(model, device, keep_last=1)
    storages: list[StorageWeakRef] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: storages.append(StorageWeakRef(args[0].untyped_storage())))
    with device:
        end = model(data())
    # The input of the last block is kept, that of the one before is still being copied.
    assert [storage.expired() for storage in storages] == [True] * 4 + [False, False]
    stats = applied.engine.stats()
    assert stats["in_flight_bytes"] == BATCH * SEQUENCE * WIDTH * 4 == stats["kept_bytes"]["in one of the last blocks"]
    with device:
        end.sum().backward()
        del end
    applied.engine.drain()
    assert all(storage.expired() for storage in storages)
    assert applied.engine.stats()["in_flight_bytes"] == 0 == applied.engine.stats()["live_records"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_device_bytes_stay_under_their_bounds(name: str, prefetch: int) -> None:
    model, device = build(name), SimulatedDevice(1)
    applied = offload_blocks(model, MODELS[name][1], min_bytes=1, keep_last=0, prefetch=prefetch, device=device)
    with device:
        for step in range(3):
            model(batch(step)).sum().backward()
            stats = applied.engine.stats()
            assert 0 < stats["peak_in_flight_bytes"] <= stats["in_flight_bound_bytes"]
            assert stats["peak_arriving_bytes"] <= stats["arriving_bound_bytes"]


def test_200_steps_grow_nothing_after_the_largest() -> None:
    """prime-rl#3196, pytorch/torchtune#2076: streams and pinned memory were made anew in each step."""
    model, device = build("branches"), SimulatedDevice(2)
    applied = offload_blocks(model, MODELS["branches"][1], min_bytes=1, keep_last=0, device=device)
    engine = applied.engine
    chance = random.Random(2)
    largest = {0: 700, 100: 900}
    pinned, rest = [], []
    for step in range(200):
        with device:
            model(batch(step, length=largest.get(step) or chance.randrange(2, 700))).sum().backward()
        stats, order = engine.stats(), engine._order
        pinned.append((stats["host_slabs"], stats["host_bytes"], stats["peak_host_used_bytes"]))
        rest.append(
            {
                **{name: stats[name] for name in ("streams", "events")},
                "device": (device.events, len(device.streams)),
                "order": (len(order._following), len(order._learned), len(order._chain.calls)),
                "engine": (len(engine._out._known), len(engine._graveyard), len(engine._in._wanted)),
            }
        )
        assert stats["live_records"] == 0 and stats["host_used_bytes"] == 0
        assert stats["in_flight_bytes"] == 0 and stats["arriving_bytes"] == 0
    # Several slabs, and slots of every size that is no larger.
    assert pinned == [pinned[0]] * 100 + [pinned[100]] * 100
    assert 1 < pinned[0][0] < pinned[100][0]
    # In the second step the order of the backward is known, so more may be under way at a time.
    assert rest[1:] == rest[1:2] * 199
    assert rest[-1]["streams"] == 2 and rest[-1]["device"][1] == 3


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_what_is_on_the_device_is_one_block_in_flight_and_the_blocks_that_are_brought_ahead(prefetch: int) -> None:
    """Counted by who is alive, and not by what the engine says."""
    model, device = Chain(), SimulatedDevice()
    inputs_only(model, device, keep_last=0, prefetch=prefetch)
    alive: list[StorageWeakRef] = []
    in_forward, in_backward = [], []
    start_in = Transfers.start_in

    def watch_forward(module: nn.Module, args: tuple[Tensor]) -> None:
        alive.append(StorageWeakRef(args[0].untyped_storage()))
        in_forward.append(sum(not storage.expired() for storage in alive))

    def watch_backward(self: Transfers, *args: Any) -> Tensor:
        destination = start_in(self, *args)
        alive.append(StorageWeakRef(destination.untyped_storage()))
        in_backward.append(sum(not storage.expired() for storage in alive))
        return destination

    hooks = [block.register_forward_pre_hook(watch_forward) for block in model.blocks[1:]]
    with device:
        end = model(data())  # the first input is the caller's
        for hook in hooks:
            hook.remove()
        alive.clear()
        with patch.object(Transfers, "start_in", watch_backward):
            end.sum().backward()
    assert in_forward == [1, 2, 2, 2, 2], "the input of a block, and that of the block before"
    assert len(in_backward) == 5 and max(in_backward) == prefetch + 1, "what is computed with, and what comes after"


@pytest.mark.parametrize("tokens", [3072, 4000, 5001])
def test_host_bytes_are_at_most_1_05_times_what_is_on_the_host(tokens: int) -> None:
    """24 inputs of equal size, 96 KiB and more, none a power of two."""
    model, device = Chain(24), SimulatedDevice()
    applied = inputs_only(model, device, keep_last=0)
    with device:
        end = model(torch.randn(tokens, WIDTH))
        stats = applied.engine.stats()
    assert stats["live_records"] == 24 and end.requires_grad
    assert 24 * tokens * WIDTH * 4 <= stats["host_used_bytes"] <= stats["host_bytes"] <= 1.05 * 24 * tokens * WIDTH * 4


def test_the_last_blocks_move_nothing_and_the_others_everything() -> None:
    """pytorch/torchtune#1443: offloading the last block costs time and saves nothing."""
    model, device = Chain(), SimulatedDevice()
    counts = []
    offload_blocks(model, "blocks.*", min_bytes=1, keep_last=2, device=device)
    for block in model.blocks:
        block.register_forward_hook(lambda *_: counts.append(len(device.copies)))
    with device:
        model(data())
    moved = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert moved[4:] == [0, 0] and all(count > 0 for count in moved[:4])


@pytest.mark.parametrize(("prefetch", "ahead"), [(0, 0), (1, 1), (2, 2)])
def test_the_backward_of_a_block_finds_its_inputs_requested_so_many_blocks_before(prefetch: int, ahead: int) -> None:
    model, device = Chain(), SimulatedDevice()
    inputs_only(model, device, keep_last=1, prefetch=prefetch)
    requested: dict[int, int] = {}

    def watch(index: int) -> Any:
        def before(module: nn.Module, grads: Any) -> None:
            requested[index] = sum(way == "in" for way, _ in device.copies)

        return before

    with device:
        model(data()).sum().backward()  # the order is learned
        x = data().requires_grad_()  # else torch warns about the hook of the first block
        device.copies.clear()
        for index, block in enumerate(model.blocks):
            block.register_full_backward_pre_hook(watch(index))
        model(x).sum().backward()
    # Block 5 is kept and block 4 is in flight. When the backward of block k begins, k + 1 has been asked for its own.
    assert requested == {5: 0, **{k: min(4, max(0, 4 - (k + 1) + ahead)) for k in range(5)}}


@pytest.mark.parametrize("name", MODELS)
def test_from_the_second_step_on_nothing_is_waited_for_on_demand(name: str) -> None:
    model, device = build(name), SimulatedDevice()
    applied = offload_blocks(model, MODELS[name][1], min_bytes=1, keep_last=0, device=device)
    with device:
        model(batch()).sum().backward()
        first = applied.engine.stats()["served"].get("on demand", 0)
        for _ in range(3):
            model(batch()).sum().backward()
    assert applied.engine.stats()["served"].get("on demand", 0) == first
    assert applied.engine.stats()["served"]["ahead"] > 0


def test_branches_are_brought_back_in_their_own_order_once_it_is_known() -> None:
    model, device = build("branches"), SimulatedDevice()
    applied = offload_blocks(model, MODELS["branches"][1], min_bytes=1, keep_last=0, prefetch=1, device=device)
    with device:
        for _ in range(3):
            model(batch()).sum().backward()
    assert applied.engine.stats()["dropped_reloads"] == 0


def test_a_mask_that_all_blocks_save_is_copied_once() -> None:
    """huggingface/transformers: a 64 x 64 mask shared by six blocks was all but 384 of 98,688 bytes moved."""
    torch.manual_seed(0)
    blocks, device = nn.ModuleList(TransformerBlock() for _ in range(4)), SimulatedDevice()
    checkpoint_blocks(blocks, blocks="*")
    applied = offload_selected(blocks, find_blocks(blocks, "*"), min_bytes=1, keep_last=0, device=device)
    mask = torch.zeros(5, 5)
    with device:
        for _ in range(2):
            x = torch.randn(2, 5, WIDTH, requires_grad=True)
            for block in blocks:
                x = block(x, mask=mask)
            x.sum().backward()
    assert device.copies.count(("out", 5 * 5 * 4)) == 2
    assert applied.engine.stats()["reused_tensors"] == 2 * 3
    # Back on the device it stays there from the last block that needs it to the first.
    assert device.copies.count(("in", 5 * 5 * 4)) == 2


class SaveAs(torch.autograd.Function):
    """Saves a tensor in some layout, and notes how it came back."""

    came_back: list[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        SaveAs.came_back = list(ctx.saved_tensors)
        return grad, *[None for _ in SaveAs.came_back]


class Saver(nn.Module):
    def __init__(self, *saved: Tensor) -> None:
        super().__init__()
        self.saved = saved

    def forward(self, x: Tensor) -> Tensor:
        return SaveAs.apply(x, *self.saved)


def round_trip(device: SimulatedDevice, *saved: Tensor) -> tuple[list[Tensor], AppliedOffload]:
    """Save tensors in a block, let the sources go, and return what the backward got."""
    model = nn.Sequential(Saver(*saved))
    applied = offload_selected(model, find_blocks(model, Saver), min_bytes=1, keep_last=0, device=device)
    with device, patch.object(Outbound, "bound", 0):  # nothing stays in flight
        end = model(torch.ones(3, requires_grad=True))
        model[0].saved = ()
        end.sum().backward()
    device.finish()
    assert device.races == []
    return SaveAs.came_back, applied


BASE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
LAYOUTS = {
    "contiguous": BASE,
    "transposed": BASE.transpose(1, 3),
    "channels last": BASE.contiguous(memory_format=torch.channels_last),
    "expanded": torch.arange(4.0).view(1, 4, 1).expand(3, 4, 2),
    "slice of a fused projection": torch.arange(36.0).view(3, 12)[:, 4:8],
    "every second": torch.arange(24.0).view(4, 6)[:, ::2],
    "overlapping windows": torch.arange(11.0).as_strided((4, 4), (2, 1), 1),
    "unsqueezed": torch.arange(6.0).view(2, 3).unsqueeze(1),
    "a single number": torch.tensor(3.5),
    "bfloat16": BASE.bfloat16(),
    "float16": BASE.half().transpose(0, 2),
    "float64": BASE.double(),
    "complex": torch.complex(BASE, BASE + 1),
    "boolean": BASE > 7,
    "integers": BASE.long(),
    "bytes": BASE.to(torch.uint8)[:, :, 1:, :],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_come_back_exactly_as_they_were(name: str) -> None:
    """huggingface/trl#5694, deepspeedai/DeepSpeed#8388, pytorch/pytorch#186396: strides were lost, out of bounds or
    expanded tensors copied in full."""
    tensor = LAYOUTS[name].clone() if LAYOUTS[name].is_contiguous() else LAYOUTS[name]
    expected = tensor.clone()
    size, stride, offset, dtype = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
    storage = tensor.untyped_storage().nbytes()
    device = SimulatedDevice(3)
    (found,), applied = round_trip(device, tensor)
    assert applied.engine.stats()["reloaded_tensors"] == 1
    assert (found.shape, found.stride(), found.storage_offset(), found.dtype) == (size, stride, offset, dtype)
    assert torch.equal(found, expected)
    assert device.copies == [("out", storage), ("in", storage)]


def test_a_transposed_view_and_its_base_share_one_copy_and_both_are_right() -> None:
    """modelscope/ms-swift#10157: a transposed view got the copy of its base, and gradients were wrong."""
    base = torch.arange(6.0).view(2, 3).clone()
    device = SimulatedDevice(4)
    (one, other), applied = round_trip(device, base, base.t())
    assert torch.equal(one, torch.arange(6.0).view(2, 3)) and torch.equal(other, torch.arange(6.0).view(2, 3).t())
    assert (one.stride(), other.stride()) == ((3, 1), (1, 3))
    assert applied.engine.stats()["offloaded_tensors"] == 1 == applied.engine.stats()["reused_tensors"]


def test_slices_of_one_projection_share_one_copy() -> None:
    device = SimulatedDevice(5)
    fused = torch.arange(36.0).view(3, 12)
    found, _ = round_trip(device, *fused.chunk(3, -1))
    assert all(map(torch.equal, found, torch.arange(36.0).view(3, 12).chunk(3, -1)))
    assert [way for way, _ in device.copies] == ["out", "in"]


Between: TypeAlias = Callable[[Tensor, SimulatedDevice], Tensor]


class Twice(nn.Module):
    """Saves a tensor, lets something be done to it, and saves what that returns."""

    def __init__(self, between: Between, device: SimulatedDevice) -> None:
        super().__init__()
        self.between, self.device = between, device

    def forward(self, x: Tensor) -> Tensor:
        saved = torch.ones(64).mul_(1)
        return SaveAs.apply(SaveAs.apply(x, saved), self.between(saved, self.device))


def changed_in_place(saved: Tensor, device: SimulatedDevice) -> Tensor:
    return saved.add_(1)


def doubled_behind_its_back(saved: Tensor, device: SimulatedDevice) -> Tensor:
    """Its own handle on the memory, which counts changes for itself: one, as the other one has."""
    other = saved.data
    return other.mul_(2)


def swapped(saved: Tensor, device: SimulatedDevice) -> Tensor:
    """Gets new memory until that has the address of what was saved, if it can be had."""
    address = saved.untyped_storage()._cdata
    saved.data = torch.full((64,), 2.0)
    device.finish()  # which knows of the old one until now
    others: list[Tensor] = []
    while len(others) < 100 and saved.untyped_storage()._cdata != address:
        saved.data = torch.full((64,), 2.0)
        others.append(saved.data)
    return saved


@pytest.mark.parametrize("between", [changed_in_place, doubled_behind_its_back, swapped])
def test_what_is_saved_again_as_something_else_is_not_taken_for_what_it_was(between: Between) -> None:
    device = SimulatedDevice(7)
    model = nn.Sequential(Twice(between, device))
    applied = offload_blocks(model, Twice, min_bytes=1, keep_last=0, device=device)
    with device, patch.object(Outbound, "bound", 0):
        for _ in range(5):
            end = model(torch.ones(3, requires_grad=True))
            (second,) = end.grad_fn.saved_tensors
            assert torch.equal(second, torch.full((64,), 2.0))
            del end, second
    assert applied.engine.stats()["reused_tensors"] == 0


def test_a_copy_that_cannot_be_started_keeps_no_host_memory() -> None:
    model, device = nn.Sequential(Adapter()), SimulatedDevice()
    applied = offload_blocks(model, Adapter, min_bytes=1, keep_last=0, device=device)
    for name in ("wait", "copy", "record"):
        lost = RuntimeError("the device is lost")
        with device, patch.object(device, name, side_effect=lost), pytest.raises(RuntimeError, match=str(lost)):
            model(torch.ones(3, WIDTH))
        stats = applied.engine.stats()
        assert stats["host_bytes"] > 0 == stats["host_used_bytes"] == stats["in_flight_bytes"] == stats["live_records"]


@pytest.mark.parametrize("wrong_guess", [False, True])
def test_what_was_handed_to_one_stream_is_not_handed_to_another(wrong_guess: bool) -> None:
    """Nor after a reload for that one which nobody used."""
    model, device = nn.Sequential(Adapter()), SimulatedDevice(6)
    applied = offload_blocks(model, Adapter, min_bytes=1, keep_last=0, device=device)
    inbound, other = applied.engine._in, device.compute_stream()
    with device, patch.object(Outbound, "bound", 0):
        end = model(torch.ones(3, WIDTH, requires_grad=True))
        tanh = end.grad_fn.next_functions[1][0]
        held = tanh._saved_result
        (copy,) = [copy for copy in (record().copy for record in applied.engine._out._known.values()) if copy.handed]
        device.order(other, device.default_stream)
        with device.on(other):
            if wrong_guess:
                inbound._expect(copy, inbound._moves.start_in(copy, other))
                inbound.drop(copy, Site.DROPPED_EVICTED)
            again = tanh._saved_result
        device.order(device.default_stream, other)
        assert held.data_ptr() != again.data_ptr() and torch.equal(held, again)
        device.order(other, device.default_stream)
    del held, again, end, tanh
    device.finish()
    assert device.races == []


@pytest.mark.parametrize("limit", ["cap", "refused"])
def test_when_host_memory_is_full_tensors_stay_on_the_device_and_it_is_said_once(
    limit: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = build("transformer"), build("transformer")
    device = SimulatedDevice(0, host_bytes=1 << 16 if limit == "refused" else None)
    cap = 1 << 16 if limit == "cap" else None
    applied = offload_blocks(model, "blocks.*", min_bytes=1, max_host_bytes=cap, device=device)
    with caplog.at_level(logging.WARNING, logger="lightning_gacp"):
        for step in range(2):
            plain(batch(step, 40)).sum().backward()
            with device:
                model(batch(step, 40)).sum().backward()
    assert same(gradients(plain), gradients(model))
    stats = applied.engine.stats()
    assert stats["host_bytes"] <= 1 << 16
    assert stats["kept_tensors"]["host memory is full"] > 0 < stats["offloaded_tensors"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert ("cap is reached" if limit == "cap" else "CUDA error: out of memory") in line and "`max_host_bytes`" in line


def test_without_device_memory_for_prefetching_tensors_come_on_demand() -> None:
    plain, model = Chain(), Chain()
    size = BATCH * SEQUENCE * WIDTH * 4
    device = SimulatedDevice(0, device_bytes=size)
    applied = inputs_only(model, device, keep_last=0, prefetch=3)
    plain(data()).sum().backward()
    with device:
        model(data()).sum().backward()
    assert same(gradients(plain), gradients(model))
    assert applied.engine.stats()["served"]["on demand"] > 0


class Exponential(nn.Module):
    """Saves its result."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


def test_a_wrong_guess_makes_room_for_what_is_needed_when_device_memory_is_short() -> None:
    model, device = nn.Sequential(*(Exponential() for _ in range(3))), SimulatedDevice(0, device_bytes=64)
    applied = offload_blocks(model, Exponential, min_bytes=1, keep_last=0, device=device)
    inputs = [torch.ones(count, requires_grad=True) for count in (16, 8, 8)]
    with device, patch.object(Outbound, "bound", 0):
        ends = [block(x).sum() for block, x in zip(model, inputs, strict=True)]
        for index in (2, 0, 1):  # after the last, the second is guessed, and both of them would be too much
            ends[index].backward()
            assert torch.equal(inputs[index].grad, torch.ones_like(inputs[index]).exp())  # type: ignore[arg-type]
    stats = applied.engine.stats()
    assert stats["waits"]["DROPPED_EVICTED"] == stats["dropped_reloads"] == 1


def test_what_comes_back_in_inference_mode_is_good_for_training() -> None:
    model, device = nn.Sequential(Exponential()), SimulatedDevice()
    offload_blocks(model, Exponential, min_bytes=1, keep_last=0, device=device)
    with device, patch.object(Outbound, "bound", 0):
        x = torch.ones(4, requires_grad=True)
        end = model(x)
        with torch.inference_mode():
            held = end.grad_fn._saved_result
        (first,) = torch.autograd.grad(end.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    assert held.is_inference() and torch.equal(second, torch.ones(4).exp())


def test_stats_are_plain_data_and_every_figure_is_right() -> None:
    device = SimulatedDevice()
    model = Chain()
    applied = inputs_only(model, device, max_host_bytes=1 << 20)
    size = BATCH * SEQUENCE * WIDTH * 4
    with device:
        for _ in range(2):
            model(data()).sum().backward()
        end = model(data())
        stats = applied.engine.stats()
        del end
    assert json.loads(json.dumps(stats)) == stats
    # Of six inputs the last is kept; that of the block before it is in flight still when its backward comes.
    assert stats == {
        "active": True,
        "offloaded_tensors": 3 * 5,
        "offloaded_bytes": 3 * 5 * size,
        "reloaded_tensors": 2 * 4,
        "reloaded_bytes": 2 * 4 * size,
        "reused_tensors": 0,
        "reused_bytes": 0,
        "kept_tensors": {"in one of the last blocks": 3},
        "kept_bytes": {"in one of the last blocks": 3 * size},
        "served": {"in flight": 2, "ahead": 2 * 4},
        "dropped_reloads": 0,
        "waits": {
            "SOURCE_WRITTEN": 3 * 5,
            "RELEASED_AT_BOUND": 3 * 4,
            "RELEASED_TO_BACKWARD": 2,
            "DESTINATION_FREE": 2 * 4,
            "HOST_WRITTEN": 2 * 4,
            "ARRIVED": 2 * 4,
            "SLOT_READ": 2 * 4,
        },
        "in_flight_bytes": size,
        "peak_in_flight_bytes": size,
        "in_flight_bound_bytes": size,
        "arriving_bytes": 0,
        "peak_arriving_bytes": size,
        "arriving_bound_bytes": 2 * size,
        "live_records": 5,
        "host_bytes": 1 << 16,
        "host_used_bytes": 5 * 512,
        "peak_host_used_bytes": 5 * 512,
        "host_cap_bytes": 1 << 20,
        "host_slabs": 1,
        "streams": 2,
        "events": device.events,
    }
