"""How long recomputation and transfers take, without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_gacp.callbacks.treatment import offload_engines
from lightning_gacp.watching import Watch, no_watch
from lightning_gacp.wrapping import layer_of


class Stopwatch:
    """Sums up the time of spans of work, by their names.

    On a CPU work is over when it returns, and the clock on the wall is read. On an accelerator it is not: there an
    event is put into the stream at each end of a span, and the pairs that the device has passed are read later, so
    nothing waits for the device but `read` at the end.

    Args:
        device: Where the work runs.
        make_event: Makes an event that can be timed; for tests.
    """

    def __init__(self, device: torch.device, make_event: Callable[[], Any] | None = None) -> None:
        self._device = device
        self._make_event = make_event or partial(torch.Event, device=device, enable_timing=True)
        self._times = make_event is not None or device.type != "cpu"
        self._spare: list[Any] = []
        self._open: deque[tuple[str, Any, Any]] = deque()
        self._ms: dict[str, float] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Stopwatch:
        """A copy of a block that is timed is timed by the same watch."""
        return self

    @contextmanager
    def span(self, name: str, stream: Any) -> Generator[None, None, None]:
        """Time what is issued inside the context, also where it is left by an exception.

        Args:
            name: What the span counts for.
            stream: The stream that does the work; ``None``: the current one.
        """
        self._ms.setdefault(name, 0.0)
        if not self._times:
            start = time.perf_counter()
            try:
                yield
            finally:
                self._ms[name] += (time.perf_counter() - start) * 1e3
            return
        stream = torch.accelerator.current_stream(self._device) if stream is None else stream
        first, last = self._event(), self._event()
        first.record(stream)
        try:
            yield
        finally:
            last.record(stream)
            self._open.append((name, first, last))

    def collect(self, wait: bool = False) -> None:
        """Take in the spans that the device has passed.

        Args:
            wait: Wait for all others too.
        """
        for _ in range(len(self._open)):
            name, first, last = self._open.popleft()
            if wait:
                last.synchronize()
            elif not last.query():
                self._open.append((name, first, last))  # its stream lags behind, another's may not
                continue
            self._ms[name] += first.elapsed_time(last)
            self._spare += [first, last]

    def seconds(self, name: str) -> float | None:
        """Return the time of all spans of this name that were collected; ``None`` where there was none."""
        return self._ms[name] / 1e3 if name in self._ms else None

    def _event(self) -> Any:
        try:
            return self._spare.pop()
        except IndexError:  # asked for, not looked up before: backwards may run in several threads
            return self._make_event()


class BlockTimes:
    """Times the recomputations and the transfers of the blocks of a model, until it is closed.

    Args:
        module: The model, with recomputation and offload applied.
        device: Where it is.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.watch = Stopwatch(device)
        self._layers: list[Any] = [
            layer for part in module.modules() if (layer := layer_of(part, "checkpoint")) is not None
        ]
        self._engines = offload_engines(module)
        self._time_with(self.watch.span)

    def close(self) -> None:
        """Stop timing."""
        self._time_with(no_watch)

    def _time_with(self, watch: Watch) -> None:
        for layer in self._layers:
            layer.watch = watch
        for engine in self._engines:
            engine.time_with(watch)
