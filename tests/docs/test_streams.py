"""The drawing of the streams in ``docs/how-it-works.md`` is what the engine does, move by move."""

from __future__ import annotations

import pytest
import torch
from offload.simulated import SimulatedDevice
from torch import Tensor, nn

from lightning_gacp.blocks import find_blocks
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.offload import offload_selected

# b, c and d of the drawing; the letters a and e stand at the copies.
WAITS = {"RELEASED_AT_BOUND": "b", "RELEASED_TO_BACKWARD": "c", "ARRIVED": "d"}


class Block(nn.Module):
    def __init__(self, number: int, log: list[str]) -> None:
        super().__init__()
        self.number, self.log = number, log
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(f"run{self.number}")
        return x + torch.tanh(self.inner(x))


@pytest.mark.parametrize(
    ("prefetch", "order"),
    [
        (1, "out run1 out b run2 out b run3 run4 | run4 c in run3 d in run2 d run1"),
        (2, "out run1 out b run2 out b run3 run4 | in run4 c in run3 d run2 d run1"),
    ],
)
def test_order(prefetch: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second step, when the order of the backward is known; a block runs again in its backward."""
    log: list[str] = []
    device = SimulatedDevice(1)
    copy, wait = device.copy, device.wait

    def logged_copy(*arguments: object) -> None:
        copy(*arguments)  # type: ignore[arg-type]
        log.append(device.copies[-1][0])

    def logged_wait(stream: object, event: object, site: object) -> None:
        log.extend(letter for name, letter in WAITS.items() if name == site.name)  # type: ignore[attr-defined]
        wait(stream, event, site)  # type: ignore[arg-type]

    monkeypatch.setattr(device, "copy", logged_copy)
    monkeypatch.setattr(device, "wait", logged_wait)
    net = nn.Sequential(*(Block(number, log) for number in range(1, 5)))
    blocks = find_blocks(net)
    with device, checkpoint_blocks(net), offload_selected(net, blocks, min_bytes=1, prefetch=prefetch, device=device):
        for _ in range(2):
            log.clear()
            loss = net(torch.randn(3, 8, requires_grad=True)).sum()
            log.append("|")
            loss.backward()
    assert " ".join(log) == order
