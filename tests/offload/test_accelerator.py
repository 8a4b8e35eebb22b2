"""The real back end: its rules without a device, and with one the numbers, the overlap and the memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.offload import offload_blocks
from lightning_gacp.offload.accelerator import AcceleratorDevice

from .models import MODELS, batch, gradients, same


class Elsewhere:
    """Stands for a tensor of a device that is not here."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def test_the_first_tensor_decides_which_device_it_is() -> None:
    device = AcceleratorDevice("cuda")
    owned = [device.owns(Elsewhere(name)) for name in ("cpu", "cuda:3", "cuda:1", "meta", "cuda:3")]  # type: ignore[arg-type]
    assert owned == [False, True, False, False, True]


def test_where_there_is_no_accelerator_none_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    assert AcceleratorDevice.find() is None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    found = AcceleratorDevice.find()
    assert found is not None and found.kind == "xpu"


# On a GPU. `CUDA_LAUNCH_BLOCKING` must not be set. `TORCH_CUDA_SANITIZER=1` checks the same runs for races.


def on_cuda(name: str, **settings: Any) -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(1)
    make, patterns = MODELS[name]
    plain = make().cuda()
    model = make().cuda()
    model.load_state_dict(plain.state_dict())
    return plain, model, offload_blocks(model, patterns, **{"min_bytes": 1, "keep_last": 0, **settings})


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["LoRA", "convolution", "branches"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_cuda_gradients_are_bit_equal(name: str, prefetch: int) -> None:
    plain, model, applied = on_cuda(name, prefetch=prefetch)
    for step in range(5):
        for one in (plain, model):
            torch.manual_seed(step)
            one(batch(step, 64).cuda()).square().sum().backward()
    torch.cuda.synchronize()
    assert same(gradients(plain), gradients(model))
    stats = applied.engine.stats()
    assert stats["offloaded_tensors"] > 0 == stats["live_records"]


class Wide(nn.Module):
    """A block whose input is large and whose computation takes longer than its copy."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def wide(depth: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Wide() for _ in range(depth))).to("cuda", torch.bfloat16)


@pytest.mark.cuda
def test_cuda_inputs_of_checkpointed_blocks_leave_the_device() -> None:
    model = wide()
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    resident = {}
    for offload in (False, True):
        with checkpoint_blocks(model, blocks=Wide, offload=offload):
            for _ in range(2):
                end = model(x).sum()
                torch.cuda.synchronize()
                resident[offload] = torch.cuda.memory_allocated()
                end.backward()
    # Of eight inputs, the first is `x`, which is ours; one is in flight and one is kept.
    assert resident[False] - resident[True] >= 5 * x.nbytes


@pytest.mark.cuda
def test_cuda_no_pinned_allocation_stream_or_event_after_the_first_step() -> None:
    model = wide(4)
    x = torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16)
    applied = offload_blocks(model, Wide, keep_last=0)
    seen = []
    for _ in range(10):
        model(x).sum().backward()
        stats = applied.engine.stats()
        seen.append((stats["host_slabs"], stats["host_bytes"], stats["events"], stats["streams"]))
    assert len(set(seen[1:])) == 1 and seen[-1][3] == 2


@pytest.mark.cuda
def test_cuda_backward_on_another_stream_and_a_retained_graph() -> None:
    plain, model, _ = on_cuda("LoRA")
    side = torch.cuda.Stream()
    for one in (plain, model):
        x = one.embed(batch(0, 64).cuda()).requires_grad_()
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            end = x
            for block in one.blocks:
                end = block(end)
        torch.cuda.current_stream().wait_stream(side)
        for _ in range(3):
            end.sum().backward(retain_graph=True)
    torch.cuda.synchronize()
    assert same(gradients(plain), gradients(model))
