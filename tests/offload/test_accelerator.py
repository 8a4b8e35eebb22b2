"""The real back end: its rules, its code on a stand-in for torch's streams; on a GPU numbers, memory and time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gacp.callbacks.stopwatch import BlockTimes
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.offload import offload_blocks
from lightning_gacp.offload.accelerator import AcceleratorDevice
from lightning_gacp.offload.device import Site
from lightning_gacp.watching import STALLED, TO_DEVICE, TO_HOST

from .double import Double, standing_in
from .models import MODELS, batch, build, gradients, same
from .workloads import WORKLOADS, run_on


class Elsewhere:
    """Stands for a tensor of a device that is not here."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def test_the_first_tensor_decides_which_device_it_is_and_another_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    device = AcceleratorDevice("cuda")
    places = ("cpu", "cuda:3", "cuda:1", "meta", "cuda:3", "cuda:1")
    with caplog.at_level(logging.WARNING, logger="lightning_gacp"):
        owned = [device.owns(Elsewhere(name)) for name in places]  # type: ignore[arg-type]
    assert owned == [False, True, False, False, True, False]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "Activation offload moves tensors of one device for each model, here `cuda:3`. Those on `cuda:1`"
    )


@pytest.mark.parametrize(("kind", "found"), [(None, False), ("xpu", True), ("cuda", True), ("mps", False)])
def test_an_accelerator_with_memory_of_its_own_is_found(
    kind: str | None, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: there)
    device = AcceleratorDevice.find()
    assert (device is not None) == found
    assert device is None or device.kind == kind


# Its code, on a stand-in for torch's streams, events and pinned memory


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_code_for_accelerators_is_free_of_races_on_the_stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = 0
    for seed in range(3):
        double = Double(seed)
        with standing_in(double, monkeypatch):
            assert run_on(double, name, seed) == []
        copies += len(double.copies)
    assert copies > 0


@pytest.mark.parametrize("site", [Site.SOURCE_WRITTEN, Site.ARRIVED, Site.DESTINATION_FREE])
def test_the_stand_in_misses_a_wait_that_the_code_leaves_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = AcceleratorDevice.wait

    def forgetful(self: AcceleratorDevice, stream: Any, event: Any, here: Site) -> None:
        if here is not site:
            wait(self, stream, event, here)

    monkeypatch.setattr(AcceleratorDevice, "wait", forgetful)
    double = Double(1)
    with standing_in(double, monkeypatch):
        assert run_on(double, "train LoRA", 1) != []


def test_no_wait_is_issued_but_those_of_named_sites_and_none_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no site names, no mutation test switches off. (The stand-in has no wait of the host at all.)"""
    double, model = Double(1), build("transformer")
    applied = offload_blocks(model, "blocks.*", min_bytes=1, device=double.back_end)
    refuse = monkeypatch.setattr
    for owner, name in ((torch.accelerator, "synchronize"), (Tensor, "record_stream")):
        refuse(owner, name, lambda *args, name=name: pytest.fail(f"`{name}` was called"))
    issued: list[Any] = []
    with standing_in(double, monkeypatch):
        wait_event = torch.Stream.wait_event
        refuse(torch.Stream, "wait_event", lambda self, event: (issued.append(event), wait_event(self, event)))
        for step in range(2):
            with double:
                model(batch(step)).square().sum().backward()
    waits = applied.engine.stats()["waits"]
    assert len(issued) == sum(waits.values()) > 0
    assert waits.keys() <= {site.name for site in Site}


def test_what_the_stand_in_offers_is_there_in_torch() -> None:
    stream, event = torch.Stream(device="cpu"), torch.Event(device="cpu", enable_timing=True)
    assert all(callable(getattr(stream, name)) for name in ("wait_event", "__enter__", "__exit__"))
    assert all(callable(getattr(event, name)) for name in ("record", "query", "elapsed_time", "synchronize"))
    assert stream.__eq__(None) is False  # what is compared before anything was brought back
    assert stream.is_capturing() is False and callable(torch.accelerator.current_stream)


def test_a_forward_that_is_captured_into_a_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would write to host memory that belongs to other tensors by then: wrong gradients, and no error."""
    double = Double()
    model = build("LoRA")
    applied = offload_blocks(model, "blocks.*", min_bytes=1, device=double.back_end)
    with standing_in(double, monkeypatch), double:
        model(batch()).sum().backward()
        monkeypatch.setattr(torch.Stream, "is_capturing", lambda self: True)
        with pytest.raises(RuntimeError, match=r"`blocks.0` is offloaded, and its forward is being captured"):
            model(batch())
        applied.remove()
        model(batch())


# On a GPU. `CUDA_LAUNCH_BLOCKING` must not be set. `TORCH_CUDA_SANITIZER=1` checks the same runs for races. What they
# need is asked of `torch.accelerator`, so that they run on any other accelerator too.

WIDE, TOKENS = 4096, 8192
"""Large enough for a block to take longer than the copy of its input."""


def there() -> torch.device:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return torch.device(device.type, torch.accelerator.current_device_index())


@pytest.fixture
def reproducible(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums whose order is not fixed would differ without offload too."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_device(name: str, **settings: Any) -> tuple[nn.Module, nn.Module, Any]:
    patterns = MODELS[name][1]
    plain, model = build(name).to(there()), build(name).to(there())
    if settings.pop("inputs_only", False):
        checkpoint_blocks(model, blocks=patterns)
    return plain, model, offload_blocks(model, patterns, **{"min_bytes": 1, "keep_last": 0, **settings})


@pytest.mark.cuda
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("inputs_only", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.usefixtures("reproducible")
def test_cuda_gradients_are_bit_equal(name: str, inputs_only: bool, prefetch: int) -> None:
    plain, model, applied = on_device(name, prefetch=prefetch, inputs_only=inputs_only)
    for step in range(5):
        for one in (plain, model):
            one(batch(step, 64).to(there())).square().sum().backward()
    assert same(gradients(plain), gradients(model))
    for module in model.modules():
        module.__dict__.pop("unused", None)  # a mixture of experts keeps a graph alive
    stats = applied.engine.stats()
    assert stats["offloaded_tensors"] > 0 == stats["live_records"]
    assert all(slab.is_pinned() for slab in applied.engine._moves.pool._slabs)


class Wide(nn.Module):
    """A block whose input is large and whose computation takes longer than its copy."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def wide(depth: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    with there():  # where a billion numbers are drawn in no time
        return nn.Sequential(*(Wide(WIDE) for _ in range(depth))).to(torch.bfloat16)


def wide_input() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(TOKENS, WIDE, generator=generator).to(there(), torch.bfloat16).requires_grad_()


@pytest.mark.cuda
def test_cuda_inputs_of_checkpointed_blocks_leave_the_device() -> None:
    model, x = wide(), wide_input()
    resident = {}
    for offload in (False, True):
        with checkpoint_blocks(model, blocks=Wide, offload=offload):
            for _ in range(2):
                end = model(x).sum()
                torch.accelerator.synchronize()
                resident[offload] = torch.accelerator.memory_allocated()
                end.backward()
                del end
    # Of eight inputs, the first is `x`, which is ours; one is in flight and one is kept.
    assert resident[False] - resident[True] >= 5 * x.nbytes


@pytest.mark.cuda
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.usefixtures("reproducible")
def test_cuda_gradients_are_bit_equal_while_copies_lag_behind_and_memory_is_used_again(recompute: bool) -> None:
    """Large copies and short kernels: everything that a missing wait would spoil is spoiled here."""

    class Short(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1.01).sin() * x

    def gradient(offload: bool) -> Tensor:
        model, x = nn.Sequential(*(Short() for _ in range(6))), wide_input()
        checkpointed = checkpoint_blocks(model, blocks=Short) if recompute else nullcontext()
        offloaded = offload_blocks(model, Short, keep_last=0) if offload else nullcontext()
        with checkpointed, offloaded:
            for _ in range(4):
                model(x).float().sum().backward()
                torch.full_like(x, float("nan")).mul_(2)  # takes memory that was let go
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(False), gradient(True))


@pytest.mark.cuda
def test_cuda_no_pinned_allocation_stream_or_event_after_the_second_step() -> None:
    model, x = wide(4), wide_input()
    applied = offload_blocks(model, Wide, keep_last=0)
    seen = []
    for _ in range(10):
        model(x).sum().backward()
        stats = applied.engine.stats()
        seen.append((stats["host_slabs"], stats["host_bytes"], stats["events"], stats["streams"]))
    # In the second step the order of the backward is known, so more may be under way at a time.
    assert len(set(seen[1:])) == 1 and seen[-1][3] == 2
    assert seen[0][:2] == seen[-1][:2]


@pytest.mark.cuda
@pytest.mark.usefixtures("reproducible")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
def test_cuda_backward_on_another_stream_and_a_retained_graph() -> None:
    plain, model, _ = on_device("LoRA")
    side = torch.Stream(device=there())
    before = torch.accelerator.current_stream()
    for one in (plain, model):
        x = one.embed(batch(0, 64).to(there())).requires_grad_()
        side.wait_stream(before)
        with side:
            end = x
            for block in one.blocks:
                end = block(end)
        before.wait_stream(side)
        for _ in range(3):
            end.sum().backward(retain_graph=True)
        torch.accelerator.synchronize()
    assert same(gradients(plain), gradients(model))


def through(blocks: nn.ModuleList, seed: int, device: torch.device) -> Tensor:
    """The gradient of the input of some blocks."""
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()
    end = x
    for block in blocks:
        end = block(end)
    return torch.autograd.grad(end.square().sum(), x)[0]


@pytest.mark.cuda
@pytest.mark.usefixtures("reproducible")
def test_cuda_graphs_of_several_threads_on_streams_of_their_own_are_kept_apart() -> None:
    plain, model, applied = on_device("LoRA")
    torch.accelerator.synchronize()
    problems: list[Any] = []

    def work(seed: int) -> None:
        try:
            with torch.Stream(device=there()):
                for _ in range(10):
                    if not torch.equal(through(plain.blocks, seed, there()), through(model.blocks, seed, there())):
                        problems.append("a gradient differs")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == [] and not any(thread.is_alive() for thread in threads)
    assert applied.engine.stats()["live_records"] == 0


@pytest.mark.cuda
@pytest.mark.usefixtures("reproducible")
def test_cuda_a_device_that_is_not_the_current_one() -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("one device")
    other = torch.device(there().type, 1)
    plain, model, applied = on_device("LoRA")
    plain, model = plain.to(other), model.to(other)
    for seed in range(3):
        assert torch.equal(through(plain.blocks, seed, other), through(model.blocks, seed, other))
    assert applied.engine.stats()["offloaded_tensors"] > 0
    assert applied.engine.device.device == other and torch.accelerator.current_device_index() == 0


@pytest.mark.cuda
def test_cuda_copies_and_what_is_waited_for_them_are_timed() -> None:
    model, x = wide(4), wide_input()
    with offload_blocks(model, Wide, keep_last=0):
        times = BlockTimes(model, there())
        for _ in range(3):
            model(x).sum().backward()
            times.watch.collect()
        times.watch.collect(wait=True)
        times.close()
    seconds = [times.watch.seconds(name) for name in (TO_HOST, TO_DEVICE, STALLED)]
    assert all(found is not None and found > 0 for found in seconds)


@pytest.mark.cuda
def test_cuda_graph_capture_is_refused() -> None:
    if there().type != "cuda":
        pytest.skip("captures are made through `torch.cuda`")
    _, model, applied = on_device("LoRA")
    tokens = batch(0, 64).to(there())
    model(tokens).sum().backward()
    with pytest.raises(RuntimeError, match="its forward is being captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(tokens)
    applied.remove()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(tokens)
