"""Where a clock can be held to the work that blocks do beside their own: off unless somebody asks for it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

RECOMPUTATION = "recomputation"
"""The forward of a block, once more, in the backward."""
TO_HOST = "to the host"
"""Copies from the device to the host, on a stream of their own."""
TO_DEVICE = "to the device"
"""Copies back, on another."""
STALLED = "stalled"
"""What the stream that computes waits for such copies."""

Watch: TypeAlias = Callable[[str, Any], AbstractContextManager[None]]
"""Called with one of the names above and the stream that does the work, ``None`` for the current one."""


def no_watch(name: str, stream: Any) -> AbstractContextManager[None]:
    """Times nothing."""
    return nullcontext()
