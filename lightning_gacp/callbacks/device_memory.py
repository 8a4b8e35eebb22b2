"""What a device's allocator knows about its memory; ``None`` where there is no allocator to ask."""

from __future__ import annotations

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
