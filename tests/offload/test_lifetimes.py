"""Nothing outlives its graph, and finalisers may run anywhere."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_gacp.offload import AppliedOffload, offload_blocks
from lightning_gacp.offload.outbound import Outbound
from lightning_gacp.offload.records import Record
from lightning_gacp.offload.transfers import Transfers

from .models import Adapter, batch, build, gradients, same
from .simulated import SimulatedDevice


@pytest.fixture(autouse=True)
def without_the_collector() -> Iterator[None]:
    """Only reference counts free anything: a cycle would be a leak."""
    gc.collect()
    gc.freeze()  # so that collections within a test look at what the test has made, and are fast
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


def offloaded(keep_last: int = 0, **settings: Any) -> tuple[nn.Module, SimulatedDevice, AppliedOffload]:
    model, device = build("transformer"), SimulatedDevice()
    return model, device, offload_blocks(model, "blocks.*", min_bytes=1, keep_last=keep_last, device=device, **settings)


def assert_empty(applied: AppliedOffload) -> None:
    stats = applied.engine.stats()
    for name in ("live_records", "host_used_bytes", "in_flight_bytes", "arriving_bytes"):
        assert stats[name] == 0, name  # type: ignore[literal-required]
    assert applied.engine._out._known == {}
    assert not applied.engine._order._chain.calls


def watch_storages(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """Weak references to every storage that is moved out."""
    seen: list[StorageWeakRef] = []
    start_out = Transfers.start_out

    def watching(self: Transfers, tensor: Tensor, stream: Any) -> Any:
        seen.append(StorageWeakRef(tensor.untyped_storage()))
        return start_out(self, tensor, stream)

    monkeypatch.setattr(Transfers, "start_out", watching)
    return seen


def test_a_forward_without_backward_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface/trl#5700: 5 GB were left because nothing cleared what a forward had stored."""
    model, device, applied = offloaded()
    storages = watch_storages(monkeypatch)
    with device:
        for _ in range(3):
            model(batch())
            applied.engine.drain()
    assert len(storages) > 0 and all(storage.expired() for storage in storages)
    assert_empty(applied)


def test_evaluation_moves_nothing() -> None:
    model, device, applied = offloaded()
    with device, torch.no_grad():
        model.eval()(batch())
    assert device.copies == [] and applied.engine.stats()["live_records"] == 0


def test_an_exception_in_the_middle_leaves_nothing_and_no_hook() -> None:
    plain = build("transformer")
    model, device, applied = offloaded()
    handle = model.blocks[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("on purpose")))
    with device:
        for _ in range(2):
            with pytest.raises(KeyError):
                model(batch())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert_empty(applied)
    handle.remove()
    plain(batch()).sum().backward()
    with device:
        model(batch()).sum().backward()
    assert same(gradients(plain), gradients(model))
    assert_empty(applied)


def test_an_exception_in_the_backward_leaves_nothing() -> None:
    model, device, applied = offloaded()

    def fail(grad: Tensor) -> Tensor:
        raise KeyError("on purpose")

    with device:
        embedded = model.embed(batch())
        mask = torch.zeros(5, 5)
        middle = model.blocks[0](embedded, mask)
        middle.register_hook(fail)
        end = model.blocks[1](middle, mask)
        with pytest.raises(KeyError):
            end.sum().backward()
        del end, middle, embedded
    assert_empty(applied)


def test_an_output_that_the_loss_does_not_use_dies_with_its_graph() -> None:
    """huggingface/trl#5730: what a subgraph that never ran had stored made memory grow by 0.6 GiB a step."""
    model, device, applied = offloaded()
    with device:
        mask = torch.zeros(5, 5)
        for _ in range(3):
            x = model.embed(batch())
            used, unused = model.blocks[0](x, mask), model.blocks[1](x, mask)
            used.sum().backward()
            assert applied.engine.stats()["live_records"] > 0
            del x, used, unused
            assert_empty(applied)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_graphs_go_backward_in_either_order(order: tuple[int, int]) -> None:
    """huggingface/trl#4236, #4280, pytorch/torchtune#2709: a second forward met what the first had stored."""
    plain = build("transformer")
    model, device, applied = offloaded()
    for one, run in ((plain, None), (model, device)):
        with run or torch.enable_grad():
            ends = [one(batch(step)).square().sum() for step in range(2)]
            for index in order:
                ends[index].backward()
            del ends
    assert same(gradients(plain), gradients(model))
    assert_empty(applied)


def test_backward_runs_after_the_offload_was_removed() -> None:
    """huggingface/trl#5700 (review): leaving the context must not clear what a later backward needs."""
    plain = build("transformer")
    model, device, applied = offloaded()
    plain(batch()).sum().backward()
    with device:
        end = model(batch()).sum()
        applied.remove()
        end.backward()
        del end
    assert same(gradients(plain), gradients(model))
    assert_empty(applied)


def test_the_engine_dies_with_its_last_graph_and_ends_what_is_under_way() -> None:
    model, device, applied = offloaded()
    engine = weakref.ref(applied.engine)
    with device:
        end = model(batch()).sum()
        applied.remove()
        del model, applied
        assert engine() is not None
        del end
    assert engine() is None
    device.finish()
    assert device.races == []


def test_the_pack_hook_leaks_no_graph() -> None:
    """pytorch/pytorch#115255, #82776: a hook that holds the tensor it was given makes a cycle nobody can collect."""
    model, device, _ = offloaded(keep_last=4)  # what stays on the device goes through the hook too
    saved: list[StorageWeakRef] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: saved.append(StorageWeakRef(output.untyped_storage())))
    with device:
        for _ in range(20):
            model(batch())
    assert [storage.expired() for storage in saved] == [True] * 80


def test_a_finaliser_in_another_thread_waits_for_no_lock() -> None:
    model, device, applied = offloaded()
    with device:
        graph = [model(batch())]
    done = threading.Event()
    with applied.engine._lock:
        thread = threading.Thread(target=lambda: (graph.clear(), done.set()))
        thread.start()
        assert done.wait(20), "the finaliser waited for the engine's lock"
        thread.join()
        assert len(applied.engine._graveyard) > 0
    assert_empty(applied)


@pytest.mark.parametrize("moment", ["start_out", "start_in", "give_back", "wait"])
def test_the_collector_runs_in_the_middle_of_the_engine(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time the engine is inside ``moment``, with its lock held, the collector frees a whole graph."""
    plain = build("transformer")
    model, device, applied = offloaded()
    garbage = 0
    original = getattr(Transfers, moment)

    def collecting(self: Transfers, *args: Any) -> Any:
        nonlocal garbage
        garbage += gc.collect() > 0
        return original(self, *args)

    for step in range(3):
        plain(batch(step)).square().sum().backward()
        with device:
            for _ in range(3):
                cycle: list[Any] = [model(batch(7))]
                cycle.append(cycle)
                del cycle
            monkeypatch.setattr(Transfers, moment, collecting)
            model(batch(step)).square().sum().backward()
            monkeypatch.undo()
    assert garbage > 0
    assert same(gradients(plain), gradients(model))
    device.finish()
    assert device.races == []
    gc.collect()
    assert_empty(applied)


class Finalised:
    """Calls a function when it dies."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __del__(self) -> None:
        self.function()


def step_with_a_collection_at_line(line: int, make_garbage: Callable[[nn.Module], Any]) -> tuple[int, AppliedOffload]:
    """Train one step, with a collection before one of the lines that it runs in the engine, and count these lines."""
    plain, model, device = build("LoRA"), build("LoRA"), SimulatedDevice(line)
    applied = offload_blocks(model, "blocks.*", min_bytes=1, keep_last=0, device=device)
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        if event == "line" and lines == line:
            sys.settrace(None)
            assert gc.collect() > 0
        return count

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return count if ENGINE in frame.f_code.co_filename else None

    plain(batch()).square().sum().backward()
    before = sys.gettrace()
    with device:
        garbage: list[Any] = [make_garbage(model)]
        garbage.append(garbage)
        del garbage
        try:
            sys.settrace(enter)
            model(batch()).square().sum().backward()
        finally:
            sys.settrace(before)
    device.finish()
    assert same(gradients(plain), gradients(model))
    assert device.races == []
    gc.collect()
    return lines, applied


ENGINE = str(Path("lightning_gacp", "offload"))
MOMENTS = range(12)


@pytest.fixture(scope="module")
def lines() -> int:
    """How many lines of the engine a step runs."""
    return step_with_a_collection_at_line(0, lambda model: model(batch(7)))[0]


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_collector_frees_a_graph_at_any_line_of_the_engine(moment: int, lines: int) -> None:
    at = random.Random(moment).randrange(1, lines)
    assert_empty(step_with_a_collection_at_line(at, lambda model: model(batch(7)))[1])


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_finaliser_that_runs_a_backward_at_any_line_of_the_engine_spoils_nothing(moment: int, lines: int) -> None:
    """Either it comes between two calls of the engine, and gets its gradient, or it is refused."""
    outcomes: list[Any] = []

    def garbage(model: nn.Module) -> Finalised:
        end, weight = model(batch(7)).sum(), model.blocks[0].up.weight

        def late_backward() -> None:
            try:
                outcomes.extend(torch.autograd.grad(end, weight))
            except RuntimeError as error:
                outcomes.append(str(error))

        return Finalised(late_backward)

    at = random.Random(moment).randrange(1, lines)
    assert_empty(step_with_a_collection_at_line(at, garbage)[1])
    plain = build("LoRA")
    (expected,) = torch.autograd.grad(plain(batch(7)).sum(), plain.blocks[0].up.weight)
    (outcome,) = outcomes
    if isinstance(outcome, str):
        assert outcome.startswith("A finaliser or a signal handler has interrupted activation offload")
    else:
        assert torch.equal(outcome, expected)


def test_a_finaliser_inside_of_the_engine_may_ask_for_statistics_and_remove_the_offload() -> None:
    model, device, applied = offloaded()
    with device:
        graph = model(batch())
        with applied.engine._alone():
            assert applied.engine.stats()["live_records"] > 0
            del graph
            applied.remove()
            assert applied.engine.stats()["live_records"] > 0, "what the graph has left is given back later"
    assert_empty(applied)


def test_backwards_in_several_threads_at_once() -> None:
    """The copies of four graphs, made and used by four threads, do not get mixed up."""
    model = nn.Sequential(*(Adapter() for _ in range(4)))
    reference = nn.Sequential(*(Adapter() for _ in range(4)))
    reference.load_state_dict(model.state_dict())
    device = SimulatedDevice()  # as a device only: operations of the threads are not watched
    applied = offload_blocks(model, "*", min_bytes=1, keep_last=0, device=device)
    inputs = [torch.randn(5, 8) for _ in range(4)]
    problems: list[Any] = []

    def work(x: Tensor) -> None:
        try:
            for _ in range(15):
                mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
                (found,) = torch.autograd.grad(model(mine).square().sum(), mine)
                (expected,) = torch.autograd.grad(reference(other).square().sum(), other)
                if not torch.equal(found, expected):
                    problems.append("a gradient differs")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == [] and not any(thread.is_alive() for thread in threads)
    assert_empty(applied)


def test_the_collector_runs_in_every_thread_inside_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread makes graphs that only the collector frees, and whoever waits or copies collects, also others'."""
    model = nn.Sequential(*(Adapter() for _ in range(3)))
    reference = nn.Sequential(*(Adapter() for _ in range(3)))
    reference.load_state_dict(model.state_dict())
    device = SimulatedDevice()  # as a device only: operations of the threads are not watched
    applied = offload_blocks(model, "*", min_bytes=1, keep_last=0, device=device)
    problems: list[Any] = []
    freed = {True: 0, False: 0}
    lock = applied.engine._lock
    start = threading.Barrier(3)

    class Noticed:
        """Dies with a graph."""

        def __del__(self) -> None:
            freed[lock._is_owned()] += 1  # type: ignore[attr-defined]

    def collecting(original: Any) -> Any:
        def collect_first(self: Transfers, *args: Any) -> Any:
            gc.collect()
            return original(self, *args)

        return collect_first

    for moment in ("wait", "start_out", "start_in", "give_back"):
        monkeypatch.setattr(Transfers, moment, collecting(getattr(Transfers, moment)))

    def work(seed: int) -> None:
        try:
            x = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
            start.wait(60)
            for _ in range(8):
                cycle: list[Any] = [model(x), Noticed()]
                cycle.append(cycle)
                del cycle
                mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
                (found,) = torch.autograd.grad(model(mine).square().sum(), mine)
                (expected,) = torch.autograd.grad(reference(other).square().sum(), other)
                if not torch.equal(found, expected):
                    problems.append("a gradient differs")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == [] and not any(thread.is_alive() for thread in threads)
    assert freed[True] > 0, "while the thread that collects holds the engine's lock"
    gc.collect()
    assert sum(freed.values()) == 3 * 8
    assert_empty(applied)


def test_two_models_share_nothing() -> None:
    """VeOmni#965 (review): the class was changed for all, and abandoned graphs stayed alive in one manager."""
    one, device, applied = offloaded()
    other, other_device, other_applied = offloaded()
    applied.remove()
    assert type(one.blocks[0]) is not type(other.blocks[0])
    with other_device:
        other(batch()).sum().backward()
    assert device.copies == [] and other_device.copies != []
    assert applied.engine is not other_applied.engine


def test_a_record_hands_its_copy_over_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, device, applied = offloaded()
    buried = []
    bury = Outbound.bury
    monkeypatch.setattr(Outbound, "bury", lambda self, copy: (buried.append(copy), bury(self, copy)))
    with device:
        model(batch()).sum().backward()
    applied.engine.drain()
    assert len(buried) == len(set(buried)) == applied.engine.stats()["offloaded_tensors"]
    assert not any(isinstance(thing, Record) for thing in gc.get_objects())
