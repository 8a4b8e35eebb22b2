"""What a device's allocator knows about its memory; ``None`` where there is no allocator to ask."""

from __future__ import annotations

import sys

import torch


def peak_allocated(device: torch.device) -> int | None:
    """Return the most bytes allocated at a time since `reset_peak`; ``None`` on a CPU and where it is not counted."""
    if device.type == "cpu":
        return None
    try:
        return int(torch.accelerator.max_memory_allocated(device))
    except (RuntimeError, NotImplementedError):  # an accelerator whose allocator keeps no statistics
        return None


def reset_peak(device: torch.device) -> None:
    """Begin to count the peak anew, where it is counted."""
    if peak_allocated(device) is not None:
        torch.accelerator.reset_peak_memory_stats(device)


def peak_resident() -> int | None:
    """Return the most bytes that this process has held since it began; ``None`` where no system counts them."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
