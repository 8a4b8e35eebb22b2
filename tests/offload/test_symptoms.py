"""Bugs that others have had in public, each named after its symptom, with the behaviour that is right.

Symptoms about layouts, memory that grows, leaks and host memory are in the neighbouring files, where the subject is.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_gacp.blocks import find_blocks
from lightning_gacp.offload import AppliedOffload, offload_blocks, offload_selected
from lightning_gacp.offload.device import Site
from lightning_gacp.offload.records import Geometry
from lightning_gacp.offload.transfers import Transfers

from .models import Adapter, batch, build, gradients, same
from .simulated import SimulatedDevice, SimulatedEvent, SimulatedStream
from .workloads import run, run_on

WIDTH = 8


class Steps(nn.Module):
    """A block that runs a function."""

    def __init__(self, function: Any, **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def apply(device: SimulatedDevice, *blocks: nn.Module, **settings: Any) -> tuple[nn.Sequential, AppliedOffload]:
    model = nn.Sequential(*blocks)
    settings = {"min_bytes": 1, "keep_last": 0, **settings}
    return model, offload_selected(model, find_blocks(model, [type(b) for b in blocks]), device=device, **settings)


def moved_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    start_out = Transfers.start_out

    def watching(self: Transfers, tensor: Tensor, stream: Any) -> Any:
        shapes.append(tuple(tensor.shape))
        return start_out(self, tensor, stream)

    monkeypatch.setattr(Transfers, "start_out", watching)
    return shapes


# In-place changes: pytorch/pytorch#128611 and #62717, axolotl's adapters. With hooks autograd no longer sees them.


def test_an_in_place_change_of_a_kept_tensor_is_autograds_error() -> None:
    device = SimulatedDevice()
    model, _ = apply(device, Steps(lambda self, x: x.exp()), keep_last=1)
    with device:
        y = model(torch.ones(4, requires_grad=True))
        y.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*at version 1; expected version 0"):
            y.sum().backward()


def test_an_in_place_change_while_the_copy_is_under_way_is_autograds_error() -> None:
    device = SimulatedDevice()
    model, applied = apply(device, Steps(lambda self, x: x.exp()))
    with device:
        y = model(torch.ones(4, requires_grad=True))
        assert applied.engine.stats()["in_flight_bytes"] > 0
        y.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*at version 1; expected version 0"):
            y.sum().backward()


def test_an_in_place_change_of_what_is_in_flight_for_others_too_is_autograds_error() -> None:
    """The first who asks must not get the changed tensor, even if nobody asks after."""

    def squared(self: nn.Module, x: Tensor) -> Tensor:
        self.__dict__["middle"] = y = x.exp()
        return y * y

    device = SimulatedDevice()
    model, applied = apply(device, Steps(squared))
    with device:
        end = model(torch.ones(4, requires_grad=True)).sum()
        middle = model[0].middle
        assert applied.engine.stats()["in_flight_bytes"] > 0 < applied.engine.stats()["reused_tensors"]
        middle.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(end, middle)


def test_an_in_place_change_seen_at_the_release_of_the_source_is_autograds_error() -> None:
    device = SimulatedDevice()
    model, applied = apply(device, Steps(lambda self, x: x.exp()), Steps(lambda self, x: x.exp()))
    with device:
        y = model[0](torch.ones(4, requires_grad=True))
        z = (y * 2).detach().requires_grad_()
        y.add_(1)
        model[1](z)
        assert applied.engine._out.live == 2 and applied.engine.stats()["waits"]["RELEASED_AT_BOUND"] == 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_an_in_place_change_after_the_copy_does_no_harm() -> None:
    device = SimulatedDevice()
    model, _ = apply(device, Steps(lambda self, x: x.exp()), Steps(lambda self, x: x.exp()))
    with device:
        x = torch.ones(4, requires_grad=True)
        y = model[0](x)
        model[1](torch.ones(4, requires_grad=True))  # its copy lets go of the source of the first
        y.add_(1)
        y.sum().backward()
    assert torch.equal(x.grad, torch.ones(4).exp())  # type: ignore[arg-type]


def test_gates_of_an_lstm_cell_which_share_a_storage_and_are_changed_one_by_one() -> None:
    """Their versions are equal and their contents are not: one copy of the storage would serve the wrong gates."""
    torch.manual_seed(0)
    cell = nn.LSTMCell(WIDTH, WIDTH)
    plain = nn.LSTMCell(WIDTH, WIDTH)
    plain.load_state_dict(cell.state_dict())
    device = SimulatedDevice()
    model, applied = apply(device, Steps(lambda self, x: self.cell(self.cell(x)[0])[1], cell=cell))
    x = torch.randn(3, WIDTH)
    plain(plain(x)[0])[1].sum().backward()
    with device:
        model(x).sum().backward()
    device.finish()
    assert same(gradients(plain), gradients(cell)) and device.races == []
    assert applied.engine.stats()["kept_tensors"]["part of a storage without being a view"] > 0


def test_a_tensor_changed_between_two_saves_is_copied_twice() -> None:
    """The second save must not find the first copy: same storage, another version."""
    device = SimulatedDevice()

    def twice(self: nn.Module, x: Tensor) -> Tensor:
        y = x * 1
        with torch.no_grad():
            first = y.clone()
        a = Save.apply(x, y)
        y.mul_(2)
        return a + Save.apply(x, y) + first

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
            ctx.save_for_backward(saved.detach())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, None

    model, applied = apply(device, Steps(twice))
    with device:
        model(torch.ones(4, requires_grad=True))
    assert applied.engine.stats()["reused_tensors"] == 0


# What is not moved


def test_weights_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """meta-llama/llama-cookbook#115: the wrapper moved the weights too. They arrive as plain views of parameters."""
    shapes = moved_shapes(monkeypatch)
    device = SimulatedDevice()
    norm = nn.BatchNorm1d(WIDTH)
    model, applied = apply(
        device,
        Steps(lambda self, x: self.two(self.norm(self.one(x))), one=nn.Linear(8, 8), norm=norm, two=nn.Linear(8, 8)),
    )
    with device:
        model(torch.randn(3, WIDTH, requires_grad=True)).sum().backward()
    # Input of each layer; batch norm's own mean and deviation of the batch.
    assert sorted(shapes) == [(3, 8), (3, 8), (3, 8), (8,), (8,)]
    assert applied.engine.stats()["kept_tensors"] == {"parameter or buffer": 5}


@pytest.mark.parametrize("trainable", [True, False])
def test_casts_of_weights_under_autocast_are_not_moved(trainable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = moved_shapes(monkeypatch)
    device = SimulatedDevice()
    linear = nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(trainable)
    model, applied = apply(device, Steps(lambda self, x: self.linear(x).sin(), linear=linear))
    with device, torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(3, WIDTH, requires_grad=True)).sum().backward()
    assert (WIDTH, 2 * WIDTH) not in shapes and (2 * WIDTH, WIDTH) not in shapes
    assert applied.engine.stats()["kept_tensors"]["cast of a parameter"] == 1
    assert (3, 2 * WIDTH) in shapes


def test_tensors_of_another_device_stay_there_and_come_back_from_there() -> None:
    """pytorch/torchtune#2456: tensors of the CPU were on the GPU after unpacking."""
    device = SimulatedDevice()
    scale = device.elsewhere(torch.full((4,), 3.0))
    model, applied = apply(device, Steps(lambda self, x: x * scale))
    with device:
        x = torch.ones(4, requires_grad=True)
        y = model(x)
        (back,) = [saved for saved in (y.grad_fn._saved_self, y.grad_fn._saved_other) if saved is not None]
        assert back.data_ptr() == scale.data_ptr()
        y.sum().backward()
    assert device.copies == [] and applied.engine.stats()["kept_tensors"] == {"on another device": 1}


def test_subclasses_sparse_and_nested_tensors_stay() -> None:
    class Tagged(Tensor):
        pass

    device = SimulatedDevice()
    sparse = torch.eye(4).to_sparse()
    tagged = torch.ones(4, 4).as_subclass(Tagged)
    model, applied = apply(device, Steps(lambda self, x: torch.sparse.mm(sparse, x) + (x * tagged).as_subclass(Tensor)))
    x = torch.randn(4, 4, requires_grad=True)
    model(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 4), 2.0))  # type: ignore[arg-type]
    kept = applied.engine.stats()["kept_tensors"]
    assert kept["not a dense layout"] == 1 and kept["tensor subclass"] >= 1
    assert device.copies == []


def test_lazily_conjugated_tensors_stay_and_are_right() -> None:
    device = SimulatedDevice()
    model, applied = apply(device, Steps(lambda self, x: x.conj() * x.conj()))
    values = torch.complex(torch.arange(3.0), torch.ones(3))
    with device:
        x = values.clone().requires_grad_()
        model(x).abs().sum().backward()
    plain = values.clone().requires_grad_()
    (plain.conj() * plain.conj()).abs().sum().backward()
    assert torch.equal(x.grad, plain.grad)  # type: ignore[arg-type]
    assert applied.engine.stats()["kept_tensors"]["lazily conjugated"] >= 1


def test_a_small_part_of_a_large_tensor_stays() -> None:
    device = SimulatedDevice()
    model, applied = apply(device, Steps(lambda self, x: x[:1].sin()))
    with device:
        model(torch.randn(64, 4, requires_grad=True)).sum().backward()
    assert device.copies == [] and applied.engine.stats()["kept_tensors"] == {"small part of its storage": 1}


def test_tensors_below_min_bytes_stay() -> None:
    device = SimulatedDevice()
    model, applied = apply(device, Steps(lambda self, x: x.sin()), min_bytes=4 * 16 + 1)
    with device:
        model(torch.randn(16, requires_grad=True)).sum().backward()
        model(torch.randn(17, requires_grad=True)).sum().backward()
    assert device.copies[0] == ("out", 4 * 17)
    assert applied.engine.stats()["kept_tensors"] == {"smaller than min_bytes": 1}


# What must come out the same


def test_adapters_behind_a_frozen_embedding_are_trained() -> None:
    """huggingface/peft#1142, transformers#26221, #42494: no input needed a gradient, so adapters got none."""
    plain, model, device = build("LoRA"), build("LoRA"), SimulatedDevice()
    offload_blocks(model, "blocks.*", min_bytes=1, device=device)
    plain(batch()).sum().backward()
    with device:
        model(batch()).sum().backward()
    assert all(block.up.weight.grad is not None for block in model.blocks)
    assert same(gradients(plain), gradients(model))


def test_dropout_draws_the_same_masks() -> None:
    from .models import Transformer

    torch.manual_seed(0)
    plain, device = Transformer(dropout=0.5), SimulatedDevice()
    model = Transformer(dropout=0.5)
    model.load_state_dict(plain.state_dict())
    offload_blocks(model, "blocks.*", min_bytes=1, keep_last=0, device=device)
    torch.manual_seed(3)
    plain(batch()).sum().backward()
    torch.manual_seed(3)
    with device:
        model(batch()).sum().backward()
    assert same(gradients(plain), gradients(model))


def test_batch_norm_counts_each_forward_once() -> None:
    model, device = build("convolution"), SimulatedDevice()
    plain = build("convolution")
    offload_blocks(model, "blocks.*", min_bytes=1, device=device)
    plain(batch()).sum().backward()
    with device:
        model(batch()).sum().backward()
    assert model.blocks[0].norm.num_batches_tracked == 1
    assert all(map(torch.equal, plain.buffers(), model.buffers()))


def test_autocast_gives_the_gradients_of_autocast() -> None:
    plain, model, device = build("LoRA"), build("LoRA"), SimulatedDevice()
    offload_blocks(model, "blocks.*", min_bytes=1, keep_last=0, device=device)
    for one, context in ((plain, torch.enable_grad()), (model, device)):
        with context:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                end = one(batch()).float().square().sum()
            end.backward()
    assert same(gradients(plain), gradients(model))


def test_the_users_own_tensors_are_not_changed() -> None:
    """deepspeedai/DeepSpeed#8282: inputs were emptied before the forward."""
    device = SimulatedDevice()
    model, _ = apply(device, *(Adapter() for _ in range(3)))
    x = torch.randn(2, WIDTH, requires_grad=True)
    before, address, version = x.detach().clone(), x.data_ptr(), x._version
    with device:
        y = model(x)
        kept = y.detach().clone()
        y.sum().backward()
    assert torch.equal(x, before) and x.data_ptr() == address and x._version == version
    assert torch.equal(y, kept)


def test_a_swap_of_a_parameters_storage_between_forward_and_backward_is_seen() -> None:
    """As FSDP does: the storage is emptied after the forward and filled again before the backward."""
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, WIDTH)
    weight = linear.weight.detach().clone()
    device = SimulatedDevice()
    model, _ = apply(device, Steps(lambda self, x: self.linear(x), linear=linear))
    x = torch.randn(2, WIDTH, requires_grad=True)
    end = model(x).sum()
    storage = linear.weight.untyped_storage()
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(linear.weight):
        storage.resize_(0)
        storage.resize_(weight.nbytes)
        linear.weight.copy_(weight)
    end.backward()
    assert torch.allclose(x.grad, weight.sum(0).expand(2, WIDTH))  # type: ignore[arg-type]


def test_a_step_of_the_optimizer_between_forward_and_backward_is_autograds_error() -> None:
    device = SimulatedDevice()
    model, _ = apply(device, Steps(lambda self, x: self.linear(x), linear=nn.Linear(WIDTH, WIDTH)))
    end = model(torch.randn(2, WIDTH, requires_grad=True)).sum()
    with torch.no_grad():
        model[0].linear.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        end.backward()


def test_sources_really_die_after_the_forward() -> None:
    """deepspeedai/DeepSpeed#522: activations were copied, and the originals stayed."""
    device = SimulatedDevice()
    model, applied = apply(device, *(Steps(lambda self, x: x.sin()) for _ in range(4)))
    storages = []
    for block in model:
        block.register_forward_pre_hook(lambda module, args: storages.append(StorageWeakRef(args[0].untyped_storage())))
    with device:
        y = model(torch.randn(16, requires_grad=True).cos())
    assert [storage.expired() for storage in storages] == [True, True, True, False]
    assert applied.engine.stats()["in_flight_bytes"] == 64
    del y


# Races. For each the program in which it shows, and what others had written, put into our engine: it must be noticed.


class Wrong:
    """Stands between the engine and the simulated device."""

    def __init__(self, device: SimulatedDevice, patch: pytest.MonkeyPatch) -> None:
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)


class AllocatesOnTheCopyStream(Wrong):
    """What is freed when the host is done with it is filled again while compute still reads it."""

    def allocate(self, nbytes: int) -> Tensor:
        with self.device.on(self.device.streams[-1]):
            return self.device.allocate(nbytes)


class AsksForTheComputeStreamOnce(Wrong):
    first: SimulatedStream | None = None

    def current_stream(self) -> SimulatedStream:
        self.first = self.first or self.device.current_stream()
        return self.first


class WaitsForItself(Wrong):
    """As one does who asks for the current stream when the side stream is current already."""

    sites = (Site.SOURCE_WRITTEN, Site.DESTINATION_FREE, Site.SLOT_READ)

    def wait(self, stream: SimulatedStream, event: SimulatedEvent, site: Site) -> None:
        if site in self.sites:
            event = self.device.new_event()
            self.device.record(event, stream)
        self.device.wait(stream, event, site)


class OverwritesSlots(WaitsForItself):
    sites = (Site.SLOT_READ,)


class LetsTheReaderGoOn(Wrong):
    def wait(self, stream: SimulatedStream, event: SimulatedEvent, site: Site) -> None:
        if site is not Site.ARRIVED:
            self.device.wait(stream, event, site)


class ClonesOnTheCopyStream(Wrong):
    """Makes what has arrived contiguous once more, and lets compute read that at once."""

    def __init__(self, device: SimulatedDevice, patch: pytest.MonkeyPatch) -> None:
        super().__init__(device, patch)
        place = Geometry.place

        def place_and_clone(self: Geometry, storage: torch.UntypedStorage) -> Tensor:
            tensor = place(self, storage)
            if self.dtype is torch.uint8 or len(device.streams) < 2:  # the engine's own view of the bytes
                return tensor
            with device.on(device.streams[-1]):
                return tensor.clone()

        patch.setattr(Geometry, "place", place_and_clone)


@pytest.mark.parametrize(
    ("symptom", "name", "bug"),
    [
        (
            "NaN because memory was reused while compute still read it (torchtune#1867, #1936)",
            "train transformer",
            AllocatesOnTheCopyStream,
        ),
        (
            "garbage because saved tensors were cloned on the side stream (trl#7195, axolotl#3833)",
            "train convolution",
            ClonesOnTheCopyStream,
        ),
        (
            "the compute stream was asked for once (trl#7195, DeepSpeed#8181)",
            "backward_changes_stream",
            AsksForTheComputeStreamOnce,
        ),
        (
            "the current stream was asked for inside the side stream's context (torchtitan#2581)",
            "train LoRA",
            WaitsForItself,
        ),
        ("a slot was written again while it was read (torchtitan#2581)", "two_streams", OverwritesSlots),
        (
            "the destination belonged to the copy stream (pytorch#106360, torchtitan#467)",
            "retained_graph",
            AllocatesOnTheCopyStream,
        ),
        ("the consumer did not wait for the transfer (diffusers#13502)", "double_backward", LetsTheReaderGoOn),
    ],
)
def test_races_of_others(symptom: str, name: str, bug: type[Wrong], monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = random.Random(symptom).sample(range(1000, 9999), 3)
    assert {seed: problems for seed in seeds if (problems := run(name, seed))} == {}

    noticed = 0
    for seed in seeds:
        with monkeypatch.context() as patch:
            device = SimulatedDevice(seed)
            patch.setattr(SimulatedDevice, "back_end", bug(device, patch))
            noticed += run_on(device, name, seed) != []
    assert noticed > 0, "the bug of others, in our engine"
