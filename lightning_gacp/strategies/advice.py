"""What is said once when the fit starts: of callbacks that stay idle by hand, and of layers that see micro-batches."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_gacp.batchnorm import notice


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


def say_what_batch_norm_sees(trainer: Trainer) -> None:
    """Names the batch norms, unless a callback that has a setting for them does so itself."""
    callbacks: list[object] = trainer.callbacks  # type: ignore[attr-defined]
    if any(hasattr(callback, "scale_batchnorm_momentum") for callback in callbacks):
        return
    said = notice(
        trainer.lightning_module,
        "`ActivationCheckpointing(scale_batchnorm_momentum=True)` lets a cycle weigh as one batch in their statistics.",
    )
    if said is not None:
        rank_zero_info(said)
