"""Pinned host memory that is allocated once and used in every step.

Pinning memory is slow (about 3 ms for each allocation) and stops the device, so nothing is ever given back before the
engine goes, and slots are cut from what is there. PyTorch rounds a pinned allocation up to a power of two, so slabs
*are* powers of two, and a slot that fits none of them is made of several pieces. Two things follow. The slabs exceed
what is in use by less than the last slab, however the sizes fall. And as any free piece will do, the pool grows
only when more is in use than ever before.
"""

import bisect
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gacp.offload.statistics import HostStats

ALIGNMENT = 512
"""Bytes. Slots start and end at multiples of it, which suits every dtype and the copy engines."""


class Piece(NamedTuple):
    """A part of a slab. ``slab`` and ``offset`` order the pieces of the pool."""

    slab: int
    offset: int
    nbytes: int


class SlabPool:
    """A pool of host memory with a cap. Not thread-safe: the engine's lock guards it.

    Args:
        allocate: Makes a flat byte tensor of pinned memory; raises ``RuntimeError`` when it cannot.
        cap: Returns the most bytes that all slabs together may take. Asked once, at the first allocation.
        smallest_slab: Bytes, a power of two.
    """

    def __init__(self, allocate: Callable[[int], Tensor], cap: Callable[[], int], smallest_slab: int = 1 << 16) -> None:
        self._allocate = allocate
        self._ask_cap = cap
        self._smallest = smallest_slab
        self._slabs: list[Tensor] = []
        self._free: list[Piece] = []
        self.cap_bytes: int | None = None
        self.total_bytes = 0
        self.used_bytes = 0
        self.peak_used_bytes = 0
        self.failure: str | None = None
        """What the allocator said when it refused."""

    def stats(self) -> HostStats:
        """What there is and was."""
        return HostStats(self.total_bytes, self.used_bytes, self.peak_used_bytes, self.cap_bytes, len(self._slabs))

    def take(self, nbytes: int) -> list[Piece] | None:
        """Take a slot of at least ``nbytes``, or return ``None`` at the cap, having changed nothing that is in use."""
        wanted = -(-nbytes // ALIGNMENT) * ALIGNMENT
        missing = wanted - (self.total_bytes - self.used_bytes)
        if missing > 0 and not self._grow(missing):
            return None
        self.used_bytes += wanted
        self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
        fitting = [piece for piece in self._free if piece.nbytes >= wanted]
        if fitting:
            return [self._cut(min(fitting, key=lambda piece: piece.nbytes), wanted)]
        pieces = []
        for piece in sorted(self._free, key=lambda piece: -piece.nbytes):
            part = self._cut(piece, min(wanted, piece.nbytes))
            pieces.append(part)
            wanted -= part.nbytes
            if wanted == 0:
                break
        return pieces

    def give(self, pieces: list[Piece]) -> None:
        """Take a slot back and join it with its free neighbours."""
        for piece in pieces:
            self.used_bytes -= piece.nbytes
            at = bisect.bisect(self._free, piece)
            after = self._free[at] if at < len(self._free) else None
            if after is not None and after.slab == piece.slab and after.offset == piece.offset + piece.nbytes:
                piece = piece._replace(nbytes=piece.nbytes + after.nbytes)
                del self._free[at]
            before = self._free[at - 1] if at > 0 else None
            if before is not None and before.slab == piece.slab and before.offset + before.nbytes == piece.offset:
                piece = before._replace(nbytes=before.nbytes + piece.nbytes)
                at -= 1
                del self._free[at]
            self._free.insert(at, piece)

    def bytes_of(self, piece: Piece) -> Tensor:
        """The memory of ``piece`` as a flat byte tensor."""
        return self._slabs[piece.slab][piece.offset : piece.offset + piece.nbytes]

    def _cut(self, piece: Piece, nbytes: int) -> Piece:
        at = bisect.bisect_left(self._free, piece)
        if piece.nbytes == nbytes:
            del self._free[at]
        else:
            self._free[at] = Piece(piece.slab, piece.offset + nbytes, piece.nbytes - nbytes)
        return Piece(piece.slab, piece.offset, nbytes)

    def _grow(self, missing: int) -> bool:
        """Add slabs for ``missing`` bytes. The excess stays below 1/32 of the whole, which bounds their number."""
        if self.cap_bytes is None:
            self.cap_bytes = self._ask_cap()
        if self.failure is not None:
            return False
        for granule in (max(self._smallest, _floor_power((self.total_bytes + missing) // 32)), self._smallest):
            rounded = -(-missing // granule) * granule
            if self.total_bytes + rounded <= self.cap_bytes:
                break
        else:
            return False
        while rounded:
            size = _floor_power(rounded)
            try:
                # A slab made in inference mode could never be written outside of it.
                with torch.inference_mode(False):
                    slab = self._allocate(size)
            except RuntimeError as error:
                self.failure = str(error)
                return False
            self._free.append(Piece(len(self._slabs), 0, size))
            self._slabs.append(slab)
            self.total_bytes += size
            rounded -= size
        return True


def tell_full(pool: SlabPool) -> None:
    """Say that the pool gives no more, and what to do about it."""
    why, remedy = "its cap is reached", "Set `max_host_bytes` higher, or offload less with `fraction`."
    if pool.failure:
        why = f"the allocation of pinned memory failed: {pool.failure}"
        remedy = "Offload less with `fraction`, or leave more to others with a lower `max_host_bytes`."
    logging.getLogger("lightning_gacp").warning(
        "Activation offload: %.2f GiB of host memory are in use and %s. From here on, what does not fit stays on the "
        "device. %s",
        pool.total_bytes / 2**30,
        why,
        remedy,
    )


def _floor_power(number: int) -> int:
    """The largest power of two that is at most ``number``; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number else 0
