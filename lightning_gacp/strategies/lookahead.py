"""What the train loader needs around it: reading a cycle ahead, resuming where training stands, ending together.

Each is put on only where it is needed:

* ``training_step`` asks for the items of the whole cycle: a cycle is read ahead, on the host;
* more was fetched than trained on when a checkpoint is written (by the look-ahead, by Lightning where a length is not
  known, by a micro-batch that was interrupted): the state that a loader had when the cycle began is kept, and after a
  restart it begins there and skips what was trained on since;
* the ranks' loaders may be of different lengths: the ranks agree before each micro-batch that all of them have one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

KEY = "lightning_gacp"  # in checkpoints, and in the states of loaders in them
SumOverRanks = Callable[[Sequence[float]], Sequence[float]]


class LookAhead:
    """Wraps a loader; everything but iteration is the loader's own.

    Args:
        loader: Any iterable of batches.
        count: Gives the items of a batch, for which a cycle is read ahead; ``None``: nothing is read ahead.
        trainer: Whose cycles these are.
        sum_over_ranks: Adds up numbers over the ranks that must end together; ``None``: there is nobody to wait for.
        ranks: How many they are.
        length: Micro-batches of the shortest loader, if all of them say how many.
    """

    def __new__(cls, loader: Any, *args: Any, **kwargs: Any) -> LookAhead:
        """Gives ``state_dict`` to those whose loader has it: Lightning asks for the methods, not for what they do."""
        return object.__new__(_StatefulLookAhead if is_stateful(loader) else cls)

    def __init__(
        self,
        loader: Any,
        count: Callable[[Any], float] | None,
        trainer: Trainer,
        sum_over_ranks: SumOverRanks | None = None,
        ranks: int = 1,
        length: int | None = None,
    ) -> None:
        self._loader = loader
        self._count = count
        self._trainer = trainer
        self._sum_over_ranks = sum_over_ranks
        self._ranks = ranks
        self._length = length
        self._started = False
        self._items: dict[int, float] = {}  # items by number of the micro-batch in the epoch
        self._ends: dict[int, int] = {}  # where the cycle ends that a micro-batch is of
        self._skip = 0  # batches of a restored cycle that were trained on already
        self._fetched = 0  # position in the epoch up to which batches were taken from the loader
        # Positions in the epoch (micro-batches) at which cycles were begun, and the loader's state there.
        self._states: deque[tuple[int, dict[str, Any]]] = deque()

    def __len__(self) -> int:
        if self._length is not None:
            return self._length
        if self._sum_over_ranks is not None:
            raise TypeError("Not every rank's loader has a length.")  # Lightning asks in collective calls
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
        self._items.clear()
        self._ends.clear()
        self._states.clear()
        most = math.inf if self._count is None else _most_batches(self._trainer, sized_len(self))
        # After a restart inside an epoch this pass begins where the training stands, less what is read again.
        skip, self._skip = self._skip, 0
        start = trained_batches(self._trainer)
        position = start - skip
        batches: Iterator[Any] | None = None
        cycle: deque[Any] = deque()
        ended = False
        while position < most and not ended:
            if batches is None or self._begins_cycle(position):
                self._keep_state(position)
            batches = iter(self._loader) if batches is None else batches
            size = 1 if self._count is None else self._left_of_cycle(position, most)
            while len(cycle) < size and not ended:
                ended, batch = self._fetch(batches, position + len(cycle))
                if not ended:
                    cycle.append(batch)
            self._note_counts(position, cycle)
            while cycle:
                position += 1
                batch = cycle.popleft()  # not held here while it is trained on
                if position > start:
                    yield batch
                del batch

    def _fetch(self, batches: Iterator[Any], position: int) -> tuple[bool, Any]:
        self._fetched = position
        try:
            found, batch = True, next(batches)
            self._fetched += 1
        except StopIteration:
            found, batch = False, None
        if self._sum_over_ranks is None:
            return not found, batch
        having = round(self._sum_over_ranks([float(found)])[0])
        if 0 < having < self._ranks:
            left = "1 micro-batch that another rank" if having == 1 else f"{having} micro-batches that other ranks"
            rank_zero_warn(
                f"The train loaders of {self._ranks - having} of {self._ranks} ranks ended after {position}"
                f" micro-batches, and the epoch ends on all ranks together: {left} had fetched"
                f" {'is' if having == 1 else 'are'} left, and whatever follows. Loaders of the same length on all ranks"
                " leave nothing."
            )
        return having < self._ranks, batch

    def _begins_cycle(self, position: int) -> bool:
        return position % self._trainer.accumulate_grad_batches == 0

    def _left_of_cycle(self, position: int, most: float) -> int:
        length = self._trainer.accumulate_grad_batches
        return int(min(length - position % length, most - position))

    def _note_counts(self, position: int, cycle: deque[Any]) -> None:
        if self._count is None:
            return
        for number, batch in enumerate(cycle, position):
            self._items[number] = float(self._count(batch))
            self._ends[number] = position + len(cycle)

    def total_of_next_cycle(self) -> float:
        """Items of the cycle that begins now, on this rank."""
        position = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        total = math.fsum(self._items[number] for number in range(position, self._ends[position]))
        for number in [number for number in self._items if number < position]:
            del self._items[number], self._ends[number]
        return total

    def _keep_state(self, position: int) -> None:
        """Keeps the loader's state, where it has one."""


class _StatefulLookAhead(LookAhead):
    """Of a loader that can resume: what was fetched and not trained on is fetched again."""

    def _keep_state(self, position: int) -> None:
        trained = trained_batches(self._trainer)
        while len(self._states) > 1 and self._states[1][0] <= trained:
            self._states.popleft()
        self._states.append((position, dict(self._loader.state_dict())))

    def state_dict(self) -> dict[str, Any]:
        """The loader's own state; where more was fetched than trained on, one more entry with where to begin again."""
        state = dict(self._loader.state_dict())
        trained = trained_batches(self._trainer)
        before = [(position, earlier) for position, earlier in self._states if position <= trained]
        ended = self._trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        if before and self._fetched > trained and not ended:
            position, earlier = before[-1]
            state[KEY] = {"loader": earlier, "skip": trained - position}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave; also takes the plain state of the loader."""
        state = dict(state)
        again = state.pop(KEY, None)
        self._skip = again["skip"] if again else 0
        self._loader.load_state_dict(again["loader"] if again else state)


def shortest(loader: Any, trainer: Trainer, rank: int, ranks: int, sum_over_ranks: SumOverRanks) -> int | None:
    """Micro-batches of the shortest of the ranks' loaders; ``None`` if one of them does not say. A collective call."""
    length = sized_len(loader)
    mine = [0.0 if length is None or i != rank else float(length) for i in range(ranks)]
    *lengths, silent = sum_over_ranks([*mine, float(length is None)])
    if silent:
        return None
    least = round(min(lengths))
    used = _most_batches(trainer, least)
    left = sum(_most_batches(trainer, round(length)) - used for length in lengths)
    if left:
        rank_zero_warn(
            f"The train loaders of the {ranks} ranks have {', '.join(f'{length:g}' for length in lengths)}"
            f" micro-batches, and an epoch ends on all ranks together, after {used:g}: {left:g}"
            f" {'is' if left == 1 else 'are'} left. Loaders of the same length on all ranks leave nothing."
        )
    return least


def is_stateful(loader: Any) -> bool:
    """Whether Lightning asks the loader for its state when it writes a checkpoint."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def trained_batches(trainer: Trainer) -> int:
    """Micro-batches of this epoch that were trained on."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)  # type: ignore[attr-defined]


def _most_batches(trainer: Trainer, length: int | None) -> float:
    """Micro-batches that ``trainer`` takes of a train loader of ``length`` batches (``None``: it does not say)."""
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        return min(limit, math.inf if length is None else length)
    return math.inf if length is None else int(length * (1.0 if limit is None else limit))
