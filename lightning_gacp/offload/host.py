"""How much host memory the copies of one process may take."""

import os
from pathlib import Path

import torch

_RESERVE = 0.125
"""Share of the memory that is left to the loader, the checkpoints and everything else."""


def default_cap() -> int:
    """Bytes of host memory for this process: what is available less a reserve, over the processes of this machine."""
    available = available_bytes()
    return max(0, int(available * (1 - _RESERVE))) // local_ranks()


def available_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that can still be taken: the lesser of the machine's and the container's.

    Args:
        proc: The kernel's memory figures.
        cgroup: The container's limits (version 2).
    """
    found = []
    try:
        for line in proc.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            found.append(max(0, int(limit) - int((cgroup / "memory.current").read_text())))
    except (OSError, ValueError):
        pass
    if not found:  # not Linux
        try:
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
        except (ValueError, OSError, AttributeError):
            found.append(8 << 30)
    return min(found)


def local_ranks() -> int:
    """Processes of this job on this machine. At least 1."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return max(1, int(os.environ["LOCAL_WORLD_SIZE"]))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return max(1, min(torch.distributed.get_world_size(), torch.accelerator.device_count()))
    return 1
