"""Offload among everything else that may be around a block or inside of it, with tensors of every kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.nn import functional

from lightning_gacp.offload import AppliedOffload, offload_blocks

from .models import gradients, same
from .simulated import SimulatedDevice

WIDTH = 8
Run = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """Runs a function of a module and a tensor."""

    def __init__(self, part: nn.Module, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.part = part
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.part, x)


def tanh(part: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(part(x)) * x


def plainly(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def results(model: nn.Module, x: Tensor, run: Run, around: AbstractContextManager[Any]) -> dict[str, Tensor | None]:
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    with around:
        end = run(model, x)
    end.square().sum().backward()
    return {"output": end.detach(), "input": x.grad, **gradients(model)}


def assert_the_same(
    function: Callable[[Any, Tensor], Tensor] = tanh,
    part: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH),
    run: Run = plainly,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> AppliedOffload:
    """Two blocks give the same with offload and without, and something was moved."""
    plain = nn.Sequential(*(Block(part(), function) for _ in range(2)))
    model, device = copy.deepcopy(plain), SimulatedDevice(5)
    applied = offload_blocks(model, Block, min_bytes=1, keep_last=0, device=device)
    x = torch.randn(6, WIDTH)
    expected = results(plain, x, run, around())
    with device:
        found = results(model, x, run, around())
    device.finish()
    assert same(expected, found)
    assert device.races == []
    stats = applied.engine.stats()
    assert stats["offloaded_tensors"] > 0 == stats["live_records"]
    return applied


# Hooks of others


@pytest.mark.parametrize(
    "around",
    [
        lambda: saved_tensors_hooks(lambda tensor: (tensor.detach().clone(),), lambda packed: packed[0]),
        save_on_cpu,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["hooks", "save_on_cpu", "autocast"],
)
def test_what_others_have_put_around_the_model_stays_outside_of_the_blocks(
    around: Callable[[], AbstractContextManager[Any]],
) -> None:
    assert_the_same(around=around)


def test_hooks_inside_of_a_block_take_what_they_enclose() -> None:
    def block(part: nn.Module, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: (tensor.detach().clone(),), lambda packed: packed[0]):
            inner = torch.tanh(part(x))
        return inner * x

    assert "parameter or buffer" not in assert_the_same(block).engine.stats()["kept_tensors"]


def test_autocast_inside_of_a_block() -> None:
    def block(part: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inner = part(x)
        return torch.tanh(inner) * x

    assert assert_the_same(block).engine.stats()["kept_tensors"]["cast of a parameter"] == 2


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection() -> None:
    assert_the_same(around=torch.autograd.detect_anomaly)


def test_hooks_that_are_switched_off_are_said_with_the_block_and_the_reason() -> None:
    model, device = nn.Sequential(Block(nn.Linear(WIDTH, WIDTH), tanh)), SimulatedDevice()
    applied = offload_blocks(model, Block, min_bytes=1, keep_last=0, device=device)
    x = torch.randn(6, WIDTH)
    with device, disable_saved_tensors_hooks("no hooks here."):
        with pytest.raises(
            RuntimeError, match=r"`0` is offloaded by hooks .* off here: no hooks here\. .*`remove\(\)`"
        ):
            model(x)
        with torch.no_grad():
            model(x)
    with pytest.raises(RuntimeError, match=r"`0` is offloaded by hooks .* off here: torch.func"):
        torch.func.grad(lambda v: model(v).sum())(x)
    applied.remove()
    torch.func.grad(lambda v: model(v).sum())(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own rules for forward mode use it
def test_forward_mode_gives_the_tangents() -> None:
    def tangent(model: nn.Module, x: Tensor) -> Tensor:
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert found is not None
        return found

    # Tangents that are zero are saved without memory behind them, which must not be read.
    assert assert_the_same(run=tangent).engine.stats()["kept_tensors"]["not a dense layout"] > 0


def test_vmap_over_the_blocks() -> None:
    assert_the_same(run=lambda model, x: torch.vmap(model)(x))


# What operations save


def recurrent(part: Any, x: Tensor) -> Tensor:
    return part(x)[0] * x


def attention(part: Any, x: Tensor) -> Tensor:
    return part(x, x, x, need_weights=False)[0] * x


def dropout(part: nn.Module, x: Tensor) -> Tensor:
    return functional.dropout(part(x), 0.5) * x


def complex_numbers(part: nn.Module, x: Tensor) -> Tensor:
    z = torch.view_as_complex(part(x).view(6, 4, 2))
    return torch.view_as_real(z.exp() * z.conj() * 1j).reshape(6, WIDTH) * x


def spectrum(part: nn.Module, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(part(x)) * 1.5, n=WIDTH) * x


def in_place(part: nn.Module, x: Tensor) -> Tensor:
    return torch.relu_(part(x).add_(1)) * x.clamp(-1, 1)


def indices(part: nn.Module, x: Tensor) -> Tensor:
    values, order = part(x).sort()
    return values.cumsum(-1).gather(-1, order) * x


def singular_values(part: nn.Module, x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x).sum() * part(x)


def nothing(part: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([part(x) * x, x[:0].exp() * 2])


def number(part: nn.Module, x: Tensor) -> Tensor:
    return part(x) * x.mean().exp() * x


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (recurrent, lambda: nn.LSTM(WIDTH, WIDTH)),
        (recurrent, lambda: nn.GRU(WIDTH, WIDTH)),
        (attention, lambda: nn.MultiheadAttention(WIDTH, 2)),
        (tanh, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
        (tanh, lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
        (tanh, lambda: nn.BatchNorm1d(WIDTH)),
        *(
            (function, lambda: nn.Linear(WIDTH, WIDTH))
            for function in (
                dropout,
                complex_numbers,
                spectrum,
                in_place,
                indices,
                singular_values,
                nothing,
                number,
            )
        ),
    ],
)
def test_whatever_operations_save_comes_back(
    function: Callable[[Any, Tensor], Tensor], part: Callable[[], nn.Module]
) -> None:
    assert_the_same(function, part)


class Keep(torch.autograd.Function):
    """Saves a tensor that has nothing to do with the gradient, and notes what comes back."""

    found: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (Keep.found,) = ctx.saved_tensors
        return grad, None


def numbers(count: int = 64) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.float32)


KINDS: dict[str, Callable[[], Tensor]] = {
    "float8 e4m3": lambda: numbers().to(torch.float8_e4m3fn),
    "float8 e5m2": lambda: numbers().to(torch.float8_e5m2),
    "float8 scales": lambda: numbers().to(torch.float8_e8m0fnu),
    "float4 pairs": lambda: numbers().to(torch.uint8).view(torch.float4_e2m1fn_x2),
    "complex32": lambda: torch.complex(numbers(), numbers()).to(torch.complex32),
    "unsigned": lambda: numbers().to(torch.uint16),
    "real view of complex": lambda: torch.view_as_real(torch.complex(numbers(), -numbers())),
    "imaginary part": lambda: torch.complex(numbers(), -numbers()).imag,
    "other type of the same bits": lambda: numbers().view(torch.int32),
    "channels last 3d": lambda: numbers(120).view(1, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last_3d),
    "leaf that requires a gradient": lambda: numbers().requires_grad_(),
    "view of a leaf": lambda: numbers().requires_grad_()[3:],
    "memory of NumPy": lambda: torch.from_numpy(numbers().numpy().copy()),
    "shared memory": lambda: numbers().share_memory_(),
    "odd offset": lambda: numbers().to(torch.uint8)[1:63].view(2, 31).t(),
}
STAY: dict[str, tuple[Callable[[], Tensor], str]] = {
    "conjugate": (lambda: torch.complex(numbers(), -numbers()).conj(), "lazily conjugated"),
    "negative": (lambda: torch.complex(numbers(), -numbers()).conj().imag, "lazily conjugated"),
    "empty": (lambda: torch.empty(0, 3), "smaller than min_bytes"),
    "freed": (lambda: (empty := numbers(), empty.untyped_storage().resize_(0))[0], "smaller than min_bytes"),
    "zeros without memory": (lambda: torch._efficientzerotensor((64,)), "not a dense layout"),
    "compressed rows": (lambda: torch.eye(8).to_sparse_csr(), "not a dense layout"),
    "quantised": (lambda: torch.quantize_per_tensor(numbers(), 0.1, 0, torch.qint8), "not a dense layout"),
    "other layout of the processor": (lambda: numbers().to_mkldnn(), "not a dense layout"),
    "shrunk": (lambda: numbers().resize_(40), "part of a storage without being a view"),
    "jagged": (lambda: torch.nested.nested_tensor([numbers(3), numbers(4)], layout=torch.jagged), "tensor subclass"),
}


def come_back(tensor: Tensor) -> tuple[Tensor, dict[str, int]]:
    """Save a tensor in a block, let its memory go where possible, and return what the backward gets."""
    device = SimulatedDevice(3)
    block = Block(nn.Identity(), lambda part, x: Keep.apply(x, part.saved))
    block.part.__dict__["saved"] = tensor
    model = nn.Sequential(block, Block(nn.Identity(), lambda part, x: (x + x.new_ones(500)[:3]).exp()))
    applied = offload_blocks(model, Block, min_bytes=1, keep_last=0, device=device)
    del tensor
    with device:
        middle = model[0](torch.ones(3, requires_grad=True))
        block.part.__dict__["saved"] = None
        end = model[1](middle)
        end.sum().backward()
    device.finish()
    assert device.races == []
    return Keep.found, applied.engine.stats()["kept_tensors"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", KINDS)
def test_a_tensor_of_any_kind_comes_back_as_it_was(name: str) -> None:
    expected = KINDS[name]()
    found, kept = come_back(KINDS[name]())
    assert kept == {}
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert (found.storage_offset(), found.is_conj()) == (expected.storage_offset(), expected.is_conj())
    one, other = (bytes(tensor.untyped_storage()) for tensor in (found, expected))  # type: ignore[arg-type]
    assert one == other


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*|.*quantized tensors.*|.*torch.ao.quantization.*")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("name", STAY)
def test_a_tensor_that_cannot_be_moved_byte_for_byte_stays(name: str) -> None:
    make, why = STAY[name]
    expected = make()
    found, kept = come_back(expected)
    assert kept == {why: 1}
    assert type(found) is type(expected) and found.shape == expected.shape and found.dtype == expected.dtype
    assert (found.is_conj(), found.is_neg(), found.layout) == (expected.is_conj(), expected.is_neg(), expected.layout)
