"""How much host memory the copies of one process may take."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

_RESERVE = 0.125
"""Share of the memory that is left to the loader, the checkpoints and everything else."""

_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
"""Where launchers say how many processes they start on a machine. Visible devices do not: each may see its own only."""


def default_cap() -> int:
    """Bytes of host memory for this process: what is available less a reserve, over the processes of this machine."""
    available = available_bytes()
    return max(0, int(available * (1 - _RESERVE))) // local_ranks()


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that can still be taken: the least that the machine, the container or the batch job leaves.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    found = [*_free_of_machine(root / "proc/meminfo"), *_free_of_groups(root)]
    if not found:  # not Linux
        try:
            found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2]
        except (ValueError, OSError, AttributeError):
            found = [8 << 30]
    return min(found)


def local_ranks() -> int:
    """Processes of this job on this machine. At least 1."""
    for name in _LOCAL_SIZES:
        if os.environ.get(name, "").isdecimal():
            return max(1, int(os.environ[name]))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return max(1, min(torch.distributed.get_world_size(), torch.accelerator.device_count()))
    return 1


def _free_of_machine(meminfo: Path) -> Iterator[int]:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _free_of_groups(root: Path) -> Iterator[int]:
    """What each control group that this process is in leaves of its limit, the outer ones too, in both versions.

    Inside of a container the path of the group may be that of the machine, and its files lie at the mount point.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    paths = {False: "", True: ""}
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            paths[number != "0"] = path.strip("/")
    for first_version, path in paths.items():
        mount = root / "sys/fs/cgroup" / ("memory" if first_version else "")
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if first_version else ("memory.max", "memory.current")
        )
        parts = Path(path).parts
        for depth in range(len(parts) + 1):
            yield from _free_of_group(mount.joinpath(*parts[:depth]), *names)


def _free_of_group(folder: Path, limit: str, usage: str) -> Iterator[int]:
    try:
        most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
    except (OSError, ValueError):  # no such group, or `max`: no limit
        return
    yield max(0, most - used + _cache_of_files(folder / "memory.stat"))


def _cache_of_files(stat: Path) -> int:
    """Bytes that the group counts as used, and that the kernel takes back when they are needed."""
    try:
        figures = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(figures.get("total_inactive_file", figures.get("inactive_file", 0)))
