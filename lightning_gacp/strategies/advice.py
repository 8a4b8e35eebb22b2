"""What is said once when the fit starts: of callbacks that stay idle by hand, and of layers that see micro-batches."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_gacp.batchnorm import notice
from lightning_gacp.strategies.settings import Settings


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


def say_that_nothing_prescales(argument: str) -> None:
    """Warns of losses that count as divided, by a `training_step` that is not told by what."""
    rank_zero_warn(
        f'`loss_reduction="prescaled"` takes the losses as divided by the items of their whole cycle, and'
        f" `training_step` has no argument `{argument}` that would tell them. If it divides by nothing, or by the items"
        f' of a micro-batch, write `loss_reduction="sum"` or `"mean"`; else add the argument.'
    )


def say_what_changes_nothing(settings: Settings, trainer: Trainer, ranks: int, defers: bool) -> None:
    """Names the settings of a strategy that have no effect in this fit, each in a line of its own."""
    set_later = (GradientAccumulationScheduler, StochasticWeightAveraging)
    callbacks: list[object] = trainer.callbacks  # type: ignore[attr-defined]
    always_one = (
        trainer.accumulate_grad_batches == 1
        and not isinstance(settings.accumulate_grad_batches, dict)
        and not any(isinstance(callback, set_later) for callback in callbacks)
    )
    if always_one and ranks == 1 and callable(settings.counter):
        rank_zero_info(
            f"`num_items={settings.counter!r}` changes no gradient: on one device, in cycles of one micro-batch, every"
            " weight is 1. Set `accumulate_grad_batches` for longer cycles."
        )
    schedule, epochs = settings.accumulate_grad_batches, trainer.max_epochs
    if isinstance(schedule, dict) and epochs is not None and epochs >= 0:
        for start in sorted(start for start in schedule if start >= epochs):
            rank_zero_info(
                f"`accumulate_grad_batches={{{start}: {schedule[start]}}}` has no effect: epochs count from 0, and"
                f" there are {epochs} of them."
            )
    if not settings.average_across_ranks and ranks == 1:
        rank_zero_info("`average_across_ranks=False` has no effect: there is one rank.")
    parameters = [parameter for parameter in trainer.lightning_module.parameters() if parameter.requires_grad]
    if parameters and all(parameter.dtype == settings.grad_dtype for parameter in parameters):
        rank_zero_info(f"`grad_dtype={settings.grad_dtype}` has no effect: it is the dtype of all trained parameters.")
    if always_one and defers:
        rank_zero_info(
            "`defer_gradient_sync=True` has no effect: cycles have one micro-batch. Set `accumulate_grad_batches` for"
            " longer ones."
        )
