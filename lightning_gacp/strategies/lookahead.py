"""A train loader that reads one cycle ahead, on the host: the items of a cycle are known before its first forward."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Trainer


class LookAhead:
    """Wraps a loader; everything but iteration is the loader's own.

    Args:
        loader: Any iterable of batches.
        count: Gives the items of a batch.
        trainer: Whose cycles these are.
    """

    def __new__(cls, loader: Any, count: Callable[[Any], float], trainer: Trainer) -> LookAhead:
        """Gives ``state_dict`` to those whose loader has it: Lightning asks for the methods, not for what they do."""
        stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        return object.__new__(_StatefulLookAhead if stateful else cls)

    def __init__(self, loader: Any, count: Callable[[Any], float], trainer: Trainer) -> None:
        self._loader = loader
        self._count = count
        self._trainer = trainer
        self._started = False
        self._totals: deque[float] = deque()
        self._skip = 0  # batches of a restored cycle that were trained on already
        self._yielded = 0  # batches handed out of the cycle that was read last
        self._before: dict[str, Any] | None = None  # the loader's state before that cycle was read

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not there yet: while unpickling
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def started(self) -> bool:
        """Whether a pass over it has begun."""
        return self._started

    def __iter__(self) -> Iterator[Any]:
        self._started = True
        self._totals.clear()
        try:
            length: int | None = len(self._loader)
        except (TypeError, NotImplementedError):
            length = None
        most = _most_batches(self._trainer, length)
        # after a restart inside an epoch, this pass begins where the training stands
        position = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        skip, self._skip = self._skip, 0
        position -= skip
        batches = None if skip else iter(self._loader)
        while position < most:
            self._before = self._loader_state()
            if batches is None:
                batches = iter(self._loader)
            length_of_cycle = self._trainer.accumulate_grad_batches
            size = int(min(length_of_cycle - position % length_of_cycle, most - position))
            cycle = [batch for _, batch in zip(range(size), batches, strict=False)]
            if not cycle:
                return
            self._totals.append(math.fsum(map(self._count, cycle)))
            position += len(cycle)
            self._yielded = skip
            cycle = cycle[skip:]
            skip = 0
            while cycle:
                self._yielded += 1
                yield cycle.pop(0)  # popped, so that a batch is not held here while it is trained on

    def total_of_next_cycle(self) -> float:
        """Items of the cycle that begins now, on this rank."""
        return self._totals.popleft()

    def _loader_state(self) -> dict[str, Any] | None:
        return None


class _StatefulLookAhead(LookAhead):
    """Of a loader that can resume: what was read ahead and not trained on is read again."""

    def _loader_state(self) -> dict[str, Any] | None:
        return dict(self._loader.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The loader's state before the cycle in progress, and how far into it training has come."""
        if self._before is None:
            return {"loader": self._loader.state_dict(), "yielded": 0}
        return {"loader": self._before, "yielded": self._yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave; also takes the plain state of the loader."""
        if set(state) == {"loader", "yielded"}:
            self._loader.load_state_dict(state["loader"])
            self._skip = state["yielded"]
        else:
            self._loader.load_state_dict(state)


def _most_batches(trainer: Trainer, length: int | None) -> float:
    """Micro-batches that ``trainer`` takes of a train loader of ``length`` batches (``None``: it does not say)."""
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        return min(limit, math.inf if length is None else length)
    return math.inf if length is None else int(length * (1.0 if limit is None else limit))
