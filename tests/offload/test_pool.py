"""The pinned memory: exact sums, no overlap, no growth that is not needed."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gacp.offload import host
from lightning_gacp.offload.pool import ALIGNMENT, Piece, SlabPool

MIB = 1 << 20


class Allocator:
    """Remembers what was asked for; refuses beyond a limit."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.sizes: list[int] = []
        self.limit = limit

    def __call__(self, nbytes: int) -> torch.Tensor:
        if sum(self.sizes) + nbytes > self.limit:
            raise RuntimeError("CUDA error: out of memory")
        self.sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")


def pool(cap: int = 1 << 40, limit: int = 1 << 40, smallest: int = 1 << 16) -> tuple[SlabPool, Allocator]:
    allocator = Allocator(limit)
    return SlabPool(allocator, lambda: cap, smallest), allocator


@pytest.mark.parametrize("nbytes", [MIB, MIB + 1, 3 * MIB // 2, 2 * MIB - 1, 5 * MIB + 4096, 100 * MIB + 12345])
@pytest.mark.parametrize("slots", [21, 32, 50, 333])
def test_host_bytes_are_at_most_1_05_times_the_bytes_offloaded(nbytes: int, slots: int) -> None:
    """pytorch/pytorch#95823, vllm-project/vllm#56410: pinned memory was up to twice what was asked for."""
    slabs, allocator = pool()
    for _ in range(slots):
        assert slabs.take(nbytes) is not None
    assert slabs.total_bytes == sum(allocator.sizes) <= 1.05 * slots * nbytes
    assert all(size.bit_count() == 1 for size in allocator.sizes), "what torch would round up to a power of two"


def test_a_size_that_is_a_power_of_two_is_one_piece_each() -> None:
    slabs, _ = pool()
    assert [len(slabs.take(4 * MIB) or []) for _ in range(64)] == [1] * 64
    assert 256 * MIB <= slabs.total_bytes <= 256 * MIB * 33 / 32


def test_the_number_of_slabs_grows_with_the_logarithm_of_the_bytes() -> None:
    slabs, allocator = pool()
    for _ in range(1000):
        slabs.take(3 * MIB)
    assert len(allocator.sizes) < 300


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 40_000), min_size=1, max_size=60),
    st.randoms(use_true_random=False),
)
def test_slots_never_overlap_and_the_pool_grows_only_beyond_its_largest_use(
    sizes: list[int], chance: random.Random
) -> None:
    slabs, allocator = pool(smallest=1 << 12)
    taken: list[list[Piece]] = []
    for size in sizes:
        while taken and chance.random() < 0.45:
            slabs.give(taken.pop(chance.randrange(len(taken))))
        free, count = slabs.total_bytes - slabs.used_bytes, len(allocator.sizes)
        pieces = slabs.take(size)
        assert pieces is not None
        taken.append(pieces)
        assert sum(piece.nbytes for piece in pieces) == -(-size // ALIGNMENT) * ALIGNMENT
        assert (len(allocator.sizes) > count) == (free < -(-size // ALIGNMENT) * ALIGNMENT)
        covered = sorted(piece for slot in taken for piece in slot)
        for before, after in itertools.pairwise(covered):
            assert before.slab < after.slab or before.offset + before.nbytes <= after.offset
        assert sum(piece.nbytes for piece in covered) == slabs.used_bytes
    while taken:
        slabs.give(taken.pop())
    assert slabs.used_bytes == 0
    # All free memory is joined again: each slab is one piece.
    assert [piece.nbytes for piece in slabs._free] == allocator.sizes
    count = len(allocator.sizes)
    whole = slabs.take(slabs.total_bytes)
    assert whole is not None and len(allocator.sizes) == count


def test_at_the_cap_nothing_is_given_and_nothing_is_allocated() -> None:
    slabs, allocator = pool(cap=3 * MIB)
    assert [slabs.take(MIB) is not None for _ in range(5)] == [True, True, True, False, False]
    assert slabs.total_bytes <= 3 * MIB
    allocated = list(allocator.sizes)
    assert slabs.take(MIB) is None and allocator.sizes == allocated


def test_a_cap_that_a_generous_slab_would_exceed_is_still_used() -> None:
    slabs, _ = pool(cap=40 * MIB + (1 << 16))
    assert sum(slabs.take(MIB) is not None for _ in range(45)) == 40


def test_a_cap_of_zero_gives_nothing() -> None:
    slabs, allocator = pool(cap=0)
    assert slabs.take(1) is None and allocator.sizes == []


def test_pinned_exhaustion_is_remembered_and_leaves_what_there_is_in_use() -> None:
    """unslothai/unsloth-zoo#1257: exhausted pinned memory looked like an out-of-memory of the device."""
    slabs, _ = pool(limit=3 * MIB)
    taken = [slabs.take(MIB) for _ in range(5)]
    assert [slot is not None for slot in taken] == [True, True, True, False, False]
    assert slabs.failure == "CUDA error: out of memory"
    slabs.give(taken[0] or [])
    assert slabs.take(MIB) is not None


def test_slabs_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    """Unsloth: buffers that were created in inference mode raised when they were used in training."""
    slabs = SlabPool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), lambda: MIB)
    with torch.inference_mode():
        pieces = slabs.take(100)
    assert pieces is not None
    assert not slabs.bytes_of(pieces[0]).is_inference()
    slabs.bytes_of(pieces[0]).fill_(1)


def system(root: Path, **files: str) -> Path:
    """A file system with these files; ``__`` stands for a slash."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc__meminfo": "MemTotal: 100 kB\nMemAvailable: 64 kB\n"}


def test_available_memory_is_the_lesser_of_the_machine_and_the_container(tmp_path: Path) -> None:
    assert host.available_bytes(system(tmp_path, **MACHINE)) == 64 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert host.available_bytes(tmp_path) == 64 * 1024
    (group / "memory.max").write_text("50000\n")
    (group / "memory.current").write_text("20000\n")
    assert host.available_bytes(tmp_path) == 30000
    # Read files that the kernel keeps in memory count as used, but are no loss.
    (group / "memory.stat").write_text("anon 11000\ninactive_file 9000\n")
    assert host.available_bytes(tmp_path) == 39000


def test_the_limit_of_a_batch_job_is_that_of_a_group_further_out(tmp_path: Path) -> None:
    """Without it the job would be killed for the memory of the machine that it was not given."""
    job = tmp_path / "sys/fs/cgroup/slurm/job_7"
    system(tmp_path, **MACHINE, proc__self__cgroup="0::/slurm/job_7/step_0/task_0\n")
    (job / "step_0/task_0").mkdir(parents=True)
    (job / "step_0/task_0/memory.max").write_text("max\n")
    (job / "memory.max").write_text("40000\n")
    (job / "memory.current").write_text("15000\n")
    assert host.available_bytes(tmp_path) == 25000


def test_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    job = tmp_path / "sys/fs/cgroup/memory/docker/7"
    system(tmp_path, **MACHINE, proc__self__cgroup="9:cpu,cpuacct:/docker/7\n4:memory:/docker/7\n0::/\n")
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text("40000\n")
    (job / "memory.usage_in_bytes").write_text("15000\n")
    (job / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 5000\n")
    assert host.available_bytes(tmp_path) == 30000


def test_the_default_cap_leaves_a_reserve_and_is_shared_by_the_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 8000)
    for name in host._LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    assert host.default_cap() == 7000
    for name in host._LOCAL_SIZES:  # torchrun, Open MPI, SLURM
        with monkeypatch.context() as patch:
            patch.setenv(name, "4")
            assert host.default_cap() == 1750
