"""Recompute blocks of the model while it is fitted."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from lightning_gacp.batchnorm import batch_norms, notice, scaled_momentum
from lightning_gacp.blocks import every_nth, find_blocks
from lightning_gacp.callbacks.idle import (
    say_if_no_batch_norm,
    say_if_not_training,
    say_if_nothing_moved,
    say_if_one_is_all,
)
from lightning_gacp.checkpointing import checkpoint_blocks
from lightning_gacp.checkpointing.layer import Recomputation
from lightning_gacp.wrapping import Applied

BATCH_NORM_ADVICE = "`scale_batchnorm_momentum=True` lets a cycle weigh as one batch in their statistics."


class ActivationCheckpointing(Callback):
    """Keeps only the inputs of the model's blocks in the forward pass, and recomputes the rest in the backward pass.

    The model is changed when a fit starts, before anything is trained or measured, and given back as it was when the
    fit ends, also by an exception. Outputs, gradients, buffers and the names in checkpoints stay what they are without.

    Args:
        every_n_layers: Recompute the first block of each stack and every n-th after it. 1 saves most memory and costs
            one more forward pass of the blocks; n costs the n-th part of it.
        blocks: What a block is: a class name, a pattern of module names such as `model.layers.*`, a class, or a list of
            these. By default blocks are found.
        policy: `full` recomputes everything. `save_matmuls` keeps the outputs of matrix products, convolutions and
            attention, so that recomputation costs none of them. A function is asked for each operation.
        offload: Keep the inputs of the recomputed blocks in host memory until the backward pass needs them.
        preserve_rng_state: Give the recomputation the random numbers of the forward pass. Without it, dropout draws
            other masks in the recomputation and gradients are wrong.
        determinism_check: `default` compares shape, dtype and device of what is recomputed, `none` nothing.
        scale_batchnorm_momentum: Under gradient accumulation, lower the momentum of batch norms so that a cycle of
            micro-batches weighs in their running statistics as one batch. It stands here and not in the strategies
            because it must hold in the recomputation too, and works with any strategy and Lightning's own accumulation.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[ActivationCheckpointing(every_n_layers=2)], logger=False)
    """

    def __init__(
        self,
        every_n_layers: int = 1,
        blocks: str | type | list[str | type] | None = None,
        policy: str | Callable[..., Any] = "full",
        offload: bool = False,
        preserve_rng_state: bool = True,
        determinism_check: str = "default",
        scale_batchnorm_momentum: bool = False,
    ) -> None:
        every_nth([], every_n_layers)  # wrong values are refused here, where they were written
        Recomputation("", policy, preserve_rng_state, determinism_check)
        self.every_n_layers = every_n_layers
        self.blocks = blocks
        self.policy = policy
        self.offload = offload
        self.preserve_rng_state = preserve_rng_state
        self.determinism_check = determinism_check
        self.scale_batchnorm_momentum = scale_batchnorm_momentum
        self.applied: Applied | None = None
        """What was done to the model, during a fit."""
        self._patched: Strategy | None = None
        self._said_batch_norm = False
        self._batch_norms: dict[str, _BatchNorm] = {}
        self._scaled = ExitStack()
        self._first = True

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._undo()  # a run that ended without teardown
        try:
            find_blocks(pl_module, self.blocks)
        except ValueError:
            # The blocks may be made later, in the module's own `setup` or in `configure_model`. Callbacks have no hook
            # between these and `on_fit_start`, which is too late: there the batch size finder measures the model first.
            self._apply_before_strategy_setup(trainer, pl_module)
        else:
            self._apply(pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first = True
        self._batch_norms = batch_norms(pl_module)
        if self.scale_batchnorm_momentum:
            say_if_no_batch_norm(bool(self._batch_norms), trainer.accumulate_grad_batches)
        self._said_batch_norm = False
        self._say_batch_norm(trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._say_batch_norm(trainer, pl_module)  # a schedule may begin to accumulate late
        if self.scale_batchnorm_momentum and self._batch_norms:
            longest = trainer.accumulate_grad_batches
            index = batch_idx % longest
            length = min(longest, trainer.num_training_batches - (batch_idx - index))  # the last cycle may be short
            self._scaled.enter_context(scaled_momentum(self._batch_norms.values(), index, int(length)))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._scaled.close()
        if self._first and self.applied is not None:
            self._first = False
            say_if_not_training(pl_module, self.applied.names)
            if self.offload:
                say_if_nothing_moved(self.applied.engine, "offload=True")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._undo()

    def _say_batch_norm(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say once that batch norms see micro-batches. Our strategies say it where this callback is not."""
        if self._said_batch_norm or trainer.accumulate_grad_batches <= 1:
            return
        self._said_batch_norm = True
        said = notice(pl_module, "" if self.scale_batchnorm_momentum else BATCH_NORM_ADVICE)
        if said is not None:
            rank_zero_info(said)

    def _apply(self, pl_module: pl.LightningModule) -> None:
        self.applied = checkpoint_blocks(
            pl_module,
            every_n_layers=self.every_n_layers,
            blocks=self.blocks,
            policy=self.policy,
            offload=self.offload,
            preserve_rng_state=self.preserve_rng_state,
            determinism_check=self.determinism_check,
        )
        say_if_one_is_all(find_blocks(pl_module, self.blocks), self.every_n_layers)

    def _apply_before_strategy_setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Apply when the strategy's `setup` is called, which comes right after `configure_model`."""
        strategy = trainer.strategy
        original = strategy.setup

        def setup(trainer: pl.Trainer) -> None:
            self._give_setup_back()
            self._apply(pl_module)
            original(trainer)

        strategy.setup = setup  # type: ignore[method-assign]
        self._patched = strategy

    def _give_setup_back(self) -> None:
        if self._patched is not None:
            del self._patched.__dict__["setup"]
            self._patched = None

    def _undo(self) -> None:
        self._scaled.close()
        self._batch_norms = {}
        self._give_setup_back()
        applied, self.applied = self.applied, None
        if applied is not None:
            applied.remove()
