"""Stands in for what `AcceleratorDevice` asks of torch, so that the very code that runs on a GPU runs here.

`torch.Stream`, `torch.Event`, the current stream, pinned memory and copies that the host does not wait for are those of
the simulated device; everything else is torch's own. So a name that torch does not have, a wrong argument or a missing
stream context shows here, and so does a race.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_gacp.offload.accelerator import AcceleratorDevice
from lightning_gacp.offload.device import Device

from .simulated import SimulatedDevice, SimulatedEvent, SimulatedStream

CPU = torch.device("cpu")


class Double(SimulatedDevice):
    """Enter it as a context, inside `standing_in`."""

    @property
    def back_end(self) -> Device:
        return AcceleratorDevice("cpu")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._quiet:
            if func is torch.ops.aten.empty.memory_format and kwargs.get("dtype") is torch.uint8 and args[0] != [0]:
                (nbytes,) = args[0]
                return self.allocate_host(nbytes) if kwargs.get("pin_memory") else self.allocate(nbytes)
            stream = self.current_stream()
            if func is torch.ops.aten.copy_.default and not stream.immediate:
                assert args[2:] == (True,), "the host would wait for this copy"
                self.copy(args[0], args[1], stream)
                return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def standing_in(double: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torch's streams and events be those of ``double``."""

    class Stream:
        """As far as it is used, `torch.Stream`: the names and arguments are its own."""

        def __init__(self, device: torch.device | None = None) -> None:
            assert device == CPU
            self.simulated: SimulatedStream = double.new_stream()

        @classmethod
        def of(cls, simulated: SimulatedStream) -> Stream:
            stream = cls.__new__(cls)
            stream.simulated = simulated
            return stream

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and self.simulated is other.simulated

        __hash__ = None  # type: ignore[assignment]  # nothing may depend on it: torch makes a new object each time

        def wait_event(self, event: Event) -> None:
            double._wait(self.simulated, event.simulated)

        def is_capturing(self) -> bool:
            return False

        def __enter__(self) -> Stream:
            self.context = double.on(self.simulated)
            self.context.__enter__()
            return self

        def __exit__(self, *exception: Any) -> None:
            self.context.__exit__(*exception)

    class Event:
        """As far as it is used, `torch.Event`."""

        def __init__(self, device: torch.device | None = None, *, enable_timing: bool = False) -> None:
            assert device == CPU
            self.simulated: SimulatedEvent = double.new_event()

        def record(self, stream: Stream | None = None) -> None:
            assert stream is not None, "the current stream is hardly ever meant"
            double.record(self.simulated, stream.simulated)

    def current_stream(device: torch.device | None = None, /) -> Stream:
        assert device == CPU
        return Stream.of(double.current_stream())

    with monkeypatch.context() as patch:
        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch.accelerator, "current_stream", current_stream)
        yield
