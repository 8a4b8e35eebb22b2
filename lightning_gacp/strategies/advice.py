"""What a callback of Lightning's cannot do in manual optimization, said once when the fit starts."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn


def say_what_stays_idle(trainer: Trainer) -> None:
    """Names the settings of ``trainer``'s callbacks that have no effect in manual optimization."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        interval = callback._train_time_interval if isinstance(callback, ModelCheckpoint) else None
        if interval is not None:
            rank_zero_warn(
                f"`ModelCheckpoint(train_time_interval={interval!r})` never saves in manual optimization: Lightning"
                " looks at the time only in automatic optimization. Write"
                " `ModelCheckpoint(every_n_train_steps=...)`, which counts optimizer steps."
            )
