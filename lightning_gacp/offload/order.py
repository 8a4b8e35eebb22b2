"""In which order saved tensors are needed again, learned from the last backward.

The first backward is guessed to be the forward in reverse. What it then does is remembered by *(block, how often that
block was called before)* and by the place of each tensor in its call. So a model whose branches run backward in another
order than the reverse is reloaded in its own order from the second step on. A wrong guess costs time, never the result:
what was not brought back ahead of time is brought back on demand.
"""

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from lightning_gacp.offload.records import HostCopy, Record

if TYPE_CHECKING:
    from lightning_gacp.offload.engine import OffloadEngine

Key: TypeAlias = tuple[int, int]
"""Index of the block, and how many calls of it came before in the same chain."""


class Call:
    """One call of a block in a forward. The saved tensors of the call own it."""

    __slots__ = (
        "__weakref__",
        "chain",
        "copies",
        "engine",
        "key",
        "moved_bytes",
        "needed_bytes",
        "previous",
        "records",
    )

    def __init__(self, engine: "OffloadEngine", key: Key, chain: "Chain", previous: "Call | None") -> None:
        self.engine = engine
        self.key = key
        self.chain = chain
        self.previous = None if previous is None else weakref.ref(previous)
        self.records: list[weakref.ref[Record]] = []
        self.copies: set[HostCopy] = set()
        self.moved_bytes = 0
        """What the call has moved to the host."""
        self.needed_bytes = 0
        """What its backward needs from the host, which includes what earlier calls have moved."""

    def needs(self, copy: HostCopy) -> None:
        """Note that the call has saved what ``copy`` is of."""
        if copy not in self.copies:
            self.copies.add(copy)
            self.needed_bytes += copy.nbytes


class Chain:
    """Calls that were made with no backward between them, and are not all gone. Their calls own it."""

    def __init__(self) -> None:
        self.calls: weakref.WeakValueDictionary[Key, Call] = weakref.WeakValueDictionary()
        self.counts: dict[int, int] = {}


class Order:
    """Makes the calls, and remembers in which order their tensors were needed. The engine's lock guards it."""

    def __init__(self) -> None:
        self._chain = Chain()
        self._latest_call: weakref.ref[Call] | None = None
        self._in_backward = False
        # What earlier backwards taught:
        self._following: dict[Key, Key] = {}
        self._learned: dict[Key, list[int]] = {}
        # What the running backward has shown so far:
        self._seen: dict[Key, dict[int, None]] = {}
        self._visiting: weakref.ref[Call] | None = None
        self._latest_key: Key | None = None

    def begin(self, engine: "OffloadEngine", block: int) -> Call:
        """Start a call of the block number ``block``."""
        self._learn()
        if self._in_backward or not self._chain.calls:
            self._chain = Chain()
            self._in_backward = False
        count = self._chain.counts.get(block, 0)
        self._chain.counts[block] = count + 1
        previous = None if self._latest_call is None else self._latest_call()
        call = Call(engine, (block, count), self._chain, previous)
        self._chain.calls[call.key] = call
        self._latest_call = weakref.ref(call)
        return call

    def visit(self, call: Call, index: int | None) -> bool:
        """Note that a tensor of ``call`` is needed now, and say whether the call before was another one."""
        self._in_backward = True
        seen = self._seen.get(call.key)
        if seen is not None and index in seen:  # needed again: this is a second backward over the same graph
            self._learn()
            seen = None
        if seen is None:
            seen = self._seen[call.key] = {}
            if self._latest_key is not None:
                self._following[self._latest_key] = call.key
            self._latest_key = call.key
        if index is not None:
            seen[index] = None
        another = self._visiting is None or self._visiting() is not call
        if another:
            self._visiting = weakref.ref(call)
        return another

    def ahead(self, call: Call, depth: int) -> list[Call]:
        """The calls that will probably be needed after ``call``, nearest first, at most ``depth``."""
        found: list[Call] = []
        at = call
        while len(found) < depth:
            following = self._following.get(at.key)
            after = None if following is None else at.chain.calls.get(following)
            if after is None and at.previous is not None:
                after = at.previous()
            if after is None or after is call or after in found:
                break
            found.append(after)
            at = after
        return found

    def remaining(self, call: Call) -> Iterator[Record]:
        """The live records of ``call`` that the running backward has not asked for, in the order it probably will."""
        seen = self._seen.get(call.key, {})
        order = self._learned.get(call.key)
        for index in reversed(range(len(call.records))) if order is None else order:
            record = call.records[index]() if index < len(call.records) and index not in seen else None
            if record is not None:
                yield record

    def _learn(self) -> None:
        """Remember what the backward that is over has shown."""
        for key, seen in self._seen.items():
            self._learned[key] = list(seen)
        self._seen = {}
        self._latest_key = None
        self._visiting = None
