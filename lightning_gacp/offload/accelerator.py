"""The device back end on ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``: CUDA, and others likewise."""

import logging
from typing import Any

import torch
from torch import Tensor

from lightning_gacp.offload.device import Event, Site, Stream

_SHARES_THE_HOSTS_MEMORY = ("mps",)
"""Accelerators from which nothing can be moved away. (They have no streams either.)"""


class AcceleratorDevice:
    """The first accelerator whose tensors are seen.

    Blocks are usually prepared while the model is still on the host, and a process that trains on ``cuda:3`` may not
    have made that its current device yet. So the index is taken from the first tensor of the right type. Tensors of
    other devices of the process are not owned, and stay where they are; that is said once.

    Args:
        kind: Type of the device, such as ``"cuda"``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.device: torch.device | None = None
        self._told = False

    @classmethod
    def find(cls) -> "AcceleratorDevice | None":
        """The accelerator of this machine, or ``None`` where there is none with memory of its own."""
        device = torch.accelerator.current_accelerator(check_available=True)
        return None if device is None or device.type in _SHARES_THE_HOSTS_MEMORY else cls(device.type)

    def owns(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lives on this device. The first tensor of the right type decides which one that is."""
        if tensor.device.type != self.kind:
            return False
        if self.device is None:
            self.device = tensor.device
        if tensor.device != self.device and not self._told:
            self._told = True
            logging.getLogger("lightning_gacp").warning(
                "Activation offload moves tensors of one device for each model, here `%s`. Those on `%s` stay there. "
                "For a model over several devices, call `offload_blocks` for the part on each.",
                self.device,
                tensor.device,
            )
        return tensor.device == self.device

    def current_stream(self) -> Stream:
        """The stream that the calling thread computes on now."""
        return torch.accelerator.current_stream(self.device)

    def capturing(self) -> bool:
        """Whether the stream that the calling thread computes on is being captured into a graph."""
        if self.device is None:
            return False
        return bool(self.current_stream().is_capturing())

    def new_stream(self) -> Stream:
        """Make a stream of our own."""
        return torch.Stream(device=self.device)

    def new_event(self) -> Event:
        """Make an event without timing."""
        return torch.Event(device=self.device)

    def record(self, event: Event, stream: Stream) -> None:
        """Mark the work issued to ``stream`` so far."""
        event.record(stream)

    def wait(self, stream: Stream, event: Event, site: Site) -> None:
        """Let later work of ``stream`` start only when ``event`` has been reached."""
        stream.wait_event(event)

    def hold(self, tensor: Tensor, site: Site) -> Tensor | None:
        """A reference is all it takes."""
        return tensor

    def copy(self, destination: Tensor, source: Tensor, stream: Stream) -> None:
        """Issue a copy between device and pinned memory."""
        context: Any = stream  # a context manager since torch 2.7, which its type hints do not say
        with context:
            destination.copy_(source, non_blocking=True)

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate device memory for the current stream, as bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def allocate_host(self, nbytes: int) -> Tensor:
        """Allocate pinned host memory, as bytes."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
