"""What can happen to a cycle, and what comes of it: by mode, and by strategy. The tests run every cell of it.

Two epochs of seven micro-batches, numbered 0 to 6 and 7 to 13, in cycles of three: 0 1 2, 3 4 5, 6, and 7 8 9, 10 11
12, 13. A fault strikes at the micro-batch that ``at`` names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CYCLE, PER_EPOCH = 3, 7

FIRST = ((0, 1, 2), (3, 4, 5), (6,))
SECOND = ((7, 8, 9), (10, 11, 12), (13,))
WHOLE = FIRST + SECOND
EXACT, CARRIED = "stepped exactly", "carried: resumed exactly"


def lost(count: int, why: str) -> str:
    """The one warning."""
    begin, whose = (f"{count} micro-batches were", "Their") if count > 1 else ("1 micro-batch was", "Its")
    return f"{begin} lost: {why}. {whose} gradients are discarded; no step was taken with them."


@dataclass(frozen=True)
class Outcome:
    """What is expected of one cell.

    Attributes:
        says: In words, for the page.
        cycles: The micro-batches of each step, in order; the weights must be those of big batches over them.
        said: The warnings, word for word, on rank 0. Other ranks say nothing.
        lost: ``lost_micro_batches`` at the end (of the last run).
        skipped: ``skipped_cycles`` at the end.
        moves: Moves of the learning-rate schedule at the end (of the last run); by default one a step.
        global_step: The Trainer's, at the end; by default one a step.
        error: Class of the exception that leaves the (first) ``fit``.
        finite: Whether the weights are numbers; if not, they are compared with nothing.
        fresh_from: From which step on a new optimizer and schedule work, for a second ``fit``.
    """

    says: str
    cycles: tuple[tuple[int, ...], ...] = WHOLE
    said: tuple[str, ...] = ()
    lost: int = 0
    skipped: int = 0
    moves: int | None = None
    global_step: int | None = None
    error: str = ""
    finite: bool = True
    fresh_from: int = 0


@dataclass(frozen=True)
class Fault:
    """One row.

    Attributes:
        title: What happens, in words.
        outcome: From (manual, strategy) to what is expected, or to the reason why there is no such cell.
        at: Micro-batch, counted over the whole run, to what happens there (see ``fault_cells.py``).
        then: ``""``, ``"fit again"`` on the same Trainer, or ``"resume"`` in a new one.
        callbacks: Names of what ``fault_cells.py`` builds.
        trainer: Settings of the Trainer.
        strategy: Settings of the strategy.
        sizes: Micro-batches an epoch, for each rank.
        unsized: Whether the loader does not know its length.
        scaled: Whether a ``GradScaler`` works.
    """

    title: str
    outcome: Callable[[bool, str], Outcome | str]
    at: dict[int, str] = field(default_factory=dict)
    then: str = ""
    callbacks: tuple[str, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, int] = (PER_EPOCH, PER_EPOCH)
    unsized: bool = False
    scaled: bool = False


def always(outcome: Outcome) -> Callable[[bool, str], Outcome]:
    """The same in every cell."""
    return lambda manual, strategy: outcome


def discarded(count: int, why: str, cycles: tuple[tuple[int, ...], ...], **more: Any) -> Outcome:
    """One warning, and these cycles are stepped with."""
    says = f"discarded, {count} micro-batch{'es' if count > 1 else ''} lost"
    return Outcome(says, cycles, (lost(count, why),), count, **more)


def by_mode(automatic: Outcome | str, manual: Outcome | str) -> Callable[[bool, str], Outcome | str]:
    """One outcome in automatic, another in manual optimization."""
    return lambda by_hand, strategy: manual if by_hand else automatic


def gives_none(before: int, automatic: Outcome, manual: Outcome | None = None) -> Callable[[bool, str], Outcome | str]:
    """Lightning refuses it on several ranks in automatic optimization; ``before`` micro-batches are lost by that."""

    def outcome(by_hand: bool, strategy: str) -> Outcome:
        if by_hand or strategy == "one":
            return manual or automatic if by_hand else automatic
        said = (lost(before, INTERRUPTED.format("RuntimeError")),) if before else ()
        return Outcome("refused by Lightning", ((0, 1, 2),), said, before, error="RuntimeError")

    return outcome


def on_ranks_only(outcome: Outcome) -> Callable[[bool, str], Outcome | str]:
    """Nothing of the kind happens to one device."""
    return lambda by_hand, strategy: "there is one rank" if strategy == "one" else outcome


def on_exception(by_hand: bool, strategy: str) -> Outcome | str:
    """Under DDP the other ranks may not come to average their gradients, and rank 0 does not wait for them."""
    if strategy != "ddp":
        return Outcome(CARRIED, error="ArithmeticError")
    why = "an exception on one of several ranks does not let them average their gradients"
    said = (lost(2, INTERRUPTED.format("ArithmeticError")), lost(2, why))
    return Outcome("discarded, 2 micro-batches lost", ((0, 1, 2), (5,), *WHOLE[2:]), said, 2, error="ArithmeticError")


INTERRUPTED = "`{}` interrupted the cycle"
ENDED = "training ended inside a cycle"
NO_STEP = discarded(2, "the cycle ended without a step of `SGD`", ((0, 1, 2), (6,), *SECOND))
LIGHTNINGS_STEPS = "Lightning makes the steps"
NO_TIME_BY_HAND = (
    "`ModelCheckpoint(train_time_interval=datetime.timedelta(seconds=3600))` never saves in manual optimization:"
    " Lightning looks at the time only in automatic optimization. Write `ModelCheckpoint(every_n_train_steps=...)`,"
    " which counts optimizer steps."
)
NO_ITEMS = (
    "A cycle of 3 micro-batches had no items at all (no target that its loss averages over): it was skipped, without a"
    " step of the optimizer or the learning-rate schedule."
)
NOT_FINITE = "a loss or a gradient of the cycle is infinite or NaN, and `skip_non_finite` skips it on all ranks"


SAVED_IN_MID_BACKWARD = Outcome(
    "discarded, 1 micro-batch lost; the interrupted one is run again",
    ((0, 1, 2), (4, 5), *WHOLE[2:]),
    (
        lost(2, INTERRUPTED.format("ArithmeticError")),
        lost(1, "the checkpoint was written while a micro-batch of the cycle was running"),
    ),
    lost=1,
    error="ArithmeticError",
)

FAULTS: dict[str, Fault] = {
    # ------------------------------------------------------------ ends of epochs
    "short last cycle": Fault("an epoch ends inside a cycle", always(Outcome(EXACT))),
    "unsized": Fault("the same, from a loader that does not know its length", always(Outcome(EXACT)), unsized=True),
    "limit": Fault(
        "`limit_train_batches` ends it inside a cycle",
        always(Outcome(EXACT, ((0, 1, 2), (3, 4), (7, 8, 9), (10, 11)))),
        trainer={"limit_train_batches": 5},
    ),
    "short epochs": Fault("epochs are shorter than a cycle", always(Outcome(EXACT, ((0, 1), (7, 8)))), sizes=(2, 2)),
    "minus one": Fault(
        "`on_train_batch_start` returns -1 inside a cycle",
        always(discarded(1, "the epoch ended inside a cycle", ((0, 1, 2), *SECOND))),
        at={4: "minus one"},
    ),
    "minus one between cycles": Fault(
        "`on_train_batch_start` returns -1 between two cycles",
        always(Outcome(EXACT, ((0, 1, 2), *SECOND))),
        at={3: "minus one"},
    ),
    # ------------------------------------------------------------ ends of training
    "should_stop": Fault(
        "`trainer.should_stop` inside a cycle",
        always(discarded(2, ENDED, ((0, 1, 2),))),
        at={4: "should_stop"},
    ),
    "max_time": Fault(
        "`max_time` is over inside a cycle", always(discarded(2, ENDED, ((0, 1, 2),))), callbacks=("timer",)
    ),
    "max_steps": Fault(
        "`max_steps` in the middle of an epoch", always(Outcome(EXACT, FIRST[:2])), trainer={"max_steps": 2}
    ),
    "interrupt": Fault(
        "`KeyboardInterrupt` inside a cycle",
        always(discarded(1, INTERRUPTED.format("KeyboardInterrupt"), ((0, 1, 2),), error="SystemExit")),
        at={4: "interrupt"},
    ),
    "exception": Fault(
        "an exception inside a cycle",
        always(discarded(1, INTERRUPTED.format("ArithmeticError"), ((0, 1, 2),), error="ArithmeticError")),
        at={4: "raise"},
    ),
    "second fit": Fault(
        "an exception inside a cycle, and a second `fit` on the same Trainer",
        always(
            Outcome(
                "discarded, 1 micro-batch lost; the second run starts clean",
                ((0, 1, 2), *WHOLE),
                (lost(1, INTERRUPTED.format("ArithmeticError")),),
                moves=len(WHOLE),
                error="ArithmeticError",
                fresh_from=1,
            )
        ),
        at={4: "raise"},
        then="fit again",
    ),
    # ------------------------------------------------------------ micro-batches that give nothing
    "none first": Fault(
        "`training_step` returns `None` in the first micro-batch of a cycle",
        gives_none(0, Outcome(EXACT, ((0, 1, 2), (4, 5), (6,), *SECOND))),
        at={3: "none"},
    ),
    "none middle": Fault(
        "the same in a middle one",
        gives_none(1, Outcome(EXACT, ((0, 1, 2), (3, 5), (6,), *SECOND))),
        at={4: "none"},
    ),
    "none last": Fault(
        "the same in the last one (in manual optimization: without `optimizer.step()`)",
        gives_none(2, Outcome(EXACT, ((0, 1, 2), (3, 4), (6,), *SECOND)), NO_STEP),
        at={5: "none"},
    ),
    "none throughout": Fault(
        "the same in all of a cycle",
        gives_none(0, Outcome("no step, nothing lost", ((0, 1, 2), (6,), *SECOND))),
        at={3: "none", 4: "none", 5: "none"},
    ),
    "none first, scaled": Fault(
        "the same in the first one, under a `GradScaler`",
        gives_none(0, Outcome(EXACT, ((0, 1, 2), (4, 5), (6,), *SECOND))),
        at={3: "none"},
        scaled=True,
    ),
    "none middle, scaled": Fault(
        "the same in a middle one, under a `GradScaler`",
        gives_none(1, Outcome(EXACT, ((0, 1, 2), (3, 5), (6,), *SECOND))),
        at={4: "none"},
        scaled=True,
    ),
    "none last, scaled": Fault(
        "the same in the last one, under a `GradScaler`",
        gives_none(2, Outcome(EXACT, ((0, 1, 2), (3, 4), (6,), *SECOND)), NO_STEP),
        at={5: "none"},
        scaled=True,
    ),
    "no items in one": Fault(
        "a micro-batch has no items, and its loss is NaN",
        always(Outcome(EXACT, ((0, 1, 2), (3, 5), (6,), *SECOND))),
        at={4: "no items"},
    ),
    "no items": Fault(
        "no micro-batch of a cycle has items",
        always(Outcome("skipped, with one warning", ((0, 1, 2), (6,), *SECOND), (NO_ITEMS,))),
        at={3: "no items", 4: "no items", 5: "no items"},
    ),
    # ------------------------------------------------------------ numbers that are none
    "nan": Fault(
        "a loss is NaN",
        always(Outcome("stepped with, as in Lightning: the weights are NaN", finite=False)),
        at={4: "nan"},
    ),
    "nan, skipped": Fault(
        "a loss is NaN on one rank, with `skip_non_finite=True`",
        always(
            Outcome(
                "skipped on all ranks, 3 micro-batches lost",
                ((0, 1, 2), (6,), *SECOND),
                (lost(3, NOT_FINITE),),
                lost=3,
                skipped=1,
            )
        ),
        at={4: "nan"},
        strategy={"skip_non_finite": True},
    ),
    "inf": Fault(
        "a gradient is infinite",
        always(Outcome("stepped with, as in Lightning: the weights are NaN", finite=False)),
        at={3: "inf"},
    ),
    "inf, skipped": Fault(
        "a gradient is infinite on one rank, with `skip_non_finite=True`",
        always(
            Outcome(
                "skipped on all ranks, 3 micro-batches lost",
                ((0, 1, 2), (6,), *SECOND),
                (lost(3, NOT_FINITE),),
                lost=3,
                skipped=1,
            )
        ),
        at={3: "inf"},
        strategy={"skip_non_finite": True},
    ),
    "inf, scaled": Fault(
        "a gradient is infinite under a `GradScaler`",
        always(
            Outcome("skipped by the scaler, which lowers its scale", ((0, 1, 2), (6,), *SECOND), global_step=len(WHOLE))
        ),
        at={3: "inf"},
        scaled=True,
    ),
    "nan, scaled, skipped": Fault(
        "a loss is NaN under a `GradScaler`, with `skip_non_finite=True`",
        always(
            Outcome(
                "skipped on all ranks, 3 micro-batches lost",
                ((0, 1, 2), (6,), *SECOND),
                (lost(3, NOT_FINITE),),
                lost=3,
                skipped=1,
            )
        ),
        at={4: "nan"},
        strategy={"skip_non_finite": True},
        scaled=True,
    ),
    # ------------------------------------------------------------ checkpoints inside a cycle
    "by time": Fault(
        "`ModelCheckpoint(train_time_interval=...)` saves inside a cycle, and the run is lost",
        by_mode(
            Outcome(CARRIED, error="ArithmeticError"),
            Outcome(
                "no checkpoint: Lightning never saves by time there, which is said at the start",
                ((0, 1, 2),),
                (NO_TIME_BY_HAND, lost(2, INTERRUPTED.format("ArithmeticError"))),
                lost=2,
                error="ArithmeticError",
            ),
        ),
        at={5: "raise"},
        then="resume",
        callbacks=("by time",),
    ),
    "validation": Fault(
        "`ModelCheckpoint` saves after a validation inside a cycle, and the run is lost",
        always(Outcome(CARRIED, error="ArithmeticError")),
        at={5: "raise"},
        then="resume",
        callbacks=("after validation",),
        trainer={"val_check_interval": 5, "num_sanity_val_steps": 0},
    ),
    "on exception": Fault(
        "an exception before the backward, and `OnExceptionCheckpoint`",
        on_exception,
        at={5: "raise"},
        then="resume",
        callbacks=("on exception",),
    ),
    "on exception, in mid-backward": Fault(
        "an exception in mid-backward, and `OnExceptionCheckpoint`",
        always(SAVED_IN_MID_BACKWARD),
        at={4: "raise in backward"},
        then="resume",
        callbacks=("on exception",),
    ),
    "SIGTERM": Fault(
        "SIGTERM, and `OnExceptionCheckpoint`",
        always(Outcome(CARRIED, error="SIGTERMException")),
        at={4: "SIGTERM"},
        then="resume",
        callbacks=("on exception",),
    ),
    "requeue": Fault(
        "SLURM's signal to save and requeue, before a backward",
        always(Outcome(CARRIED, error="ArithmeticError")),
        at={4: "SIGUSR1"},
        then="resume",
        callbacks=("slurm",),
    ),
    "requeue in mid-backward": Fault(
        "the same in mid-backward",
        always(SAVED_IN_MID_BACKWARD),
        at={4: "SIGUSR1 in backward"},
        then="resume",
        callbacks=("slurm",),
    ),
    # ------------------------------------------------------------ several ranks, and what is refused
    "uneven": Fault(
        "the loader of one rank ends earlier, and does not know its length",
        on_ranks_only(
            Outcome(
                "the epoch ends on all ranks; stepped exactly",
                ((0, 1, 2), (3, 4), (7, 8, 9), (10, 11)),
                (
                    "The train loaders of 1 of 2 ranks ended after 5 micro-batches, and the epoch ends on all ranks"
                    " together: 1 micro-batch that another rank had fetched is left, and whatever follows. Loaders of"
                    " the same length on all ranks leave nothing.",
                )
                * 2,
            )
        ),
        sizes=(PER_EPOCH, 5),
        unsized=True,
    ),
    "uneven, sized": Fault(
        "the loader of one rank is shorter, and knows it",
        on_ranks_only(
            Outcome(
                "the epoch ends on all ranks; stepped exactly",
                ((0, 1, 2), (3, 4), (7, 8, 9), (10, 11)),
                (
                    "The train loaders of the 2 ranks have 7, 5 micro-batches, and an epoch ends on all ranks together,"
                    " after 5: 2 are left. Loaders of the same length on all ranks leave nothing.",
                ),
            )
        ),
        sizes=(PER_EPOCH, 5),
    ),
    "step on some": Fault(
        "`optimizer.step()` on some micro-batches only, with a backward on all",
        by_mode(
            LIGHTNINGS_STEPS,
            Outcome("refused", (), error="MisconfigurationException"),
        ),
        at={1: "no step", 2: "no step"},
    ),
    "two steps": Fault(
        "`optimizer.step()` twice in one `training_step`",
        by_mode(
            LIGHTNINGS_STEPS,
            Outcome("refused", (), error="MisconfigurationException"),
        ),
        at={1: "two steps"},
    ),
}
