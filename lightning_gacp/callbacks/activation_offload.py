"""Keep activations in host memory while the model is fitted."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_gacp.blocks import evenly_spaced, find_blocks
from lightning_gacp.callbacks.idle import say_if_nothing_moved
from lightning_gacp.offload import AppliedOffload, offload_blocks
from lightning_gacp.offload.apply import check_numbers


class ActivationOffload(Callback):
    """Keeps what the model's blocks save for their backward in host memory, without recomputing anything.

    These are many bytes. Where the blocks are checkpointed, `ActivationCheckpointing(offload=True)` moves only their
    inputs, about a seventeenth, which is what should be tried first. On a block that has both, this one moves what the
    checkpoint keeps. The model is changed when a fit starts and given back as it was when it ends, also by an
    exception. The gradients are bit for bit the same.

    Args:
        blocks: What a block is: a class name, a pattern of module names such as `model.layers.*`, a class, or a list of
            these. By default blocks are found.
        fraction: Share of the blocks to offload, evenly spaced.
        min_bytes: Smaller tensors stay on the device.
        max_host_bytes: Cap of the pinned host memory of each process. By default what is available less a reserve, over
            the processes of the machine. At the cap, tensors stay on the device.
        keep_last: So many of the chosen blocks, at the end, keep everything on the device: the backward needs it at
            once.
        prefetch: How many blocks ahead of the backward tensors are brought back. 0: only when they are needed.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[ActivationOffload(fraction=0.5)], logger=False)
    """

    def __init__(
        self,
        blocks: str | type | list[str | type] | None = None,
        fraction: float = 1.0,
        min_bytes: int = 1 << 20,
        max_host_bytes: int | None = None,
        keep_last: int = 1,
        prefetch: int = 1,
    ) -> None:
        evenly_spaced([], fraction)  # wrong values are refused here, where they were written
        check_numbers(min_bytes=min_bytes, max_host_bytes=max_host_bytes, keep_last=keep_last, prefetch=prefetch)
        self.blocks = blocks
        self.fraction = fraction
        self.min_bytes = min_bytes
        self.max_host_bytes = max_host_bytes
        self.keep_last = keep_last
        self.prefetch = prefetch
        self.applied: AppliedOffload | None = None
        """What was done to the model, during a fit; its ``engine.stats()`` says what was moved."""
        self._give_hook_back: Callable[[], None] | None = None
        self._first = True

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._undo()  # a run that ended without teardown
        try:
            find_blocks(pl_module, self.blocks)
        except ValueError:
            # The blocks may be made later, in the module's own `setup` or in `configure_model`.
            self._apply_after_configure_model(trainer, pl_module)
        else:
            self._apply(trainer, pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first = True

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self.applied is None:
            return
        # A graph that died without a backward has left what only the engine may give back.
        self.applied.engine.drain()
        if self._first:
            self._first = False
            say_if_nothing_moved(self.applied.engine, "ActivationOffload")

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._undo()

    def _apply(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # On a machine with an accelerator that is not used, there is nothing to move from either.
        device = {"device": None} if trainer.strategy.root_device.type == "cpu" else {}
        self.applied = offload_blocks(
            pl_module,
            blocks=self.blocks,
            fraction=self.fraction,
            min_bytes=self.min_bytes,
            max_host_bytes=self.max_host_bytes,
            keep_last=self.keep_last,
            prefetch=self.prefetch,
            **device,
        )

    def _apply_after_configure_model(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Apply when `configure_model` has run, which Lightning calls on every module. Callbacks have no hook there."""
        original = pl_module.configure_model

        def configure_model() -> None:
            give_back()
            original()
            self._apply(trainer, pl_module)

        def give_back() -> None:
            if pl_module.__dict__.get("configure_model") is configure_model:
                del pl_module.configure_model
            self._give_hook_back = None

        pl_module.configure_model = configure_model  # type: ignore[method-assign]
        self._give_hook_back = give_back

    def _undo(self) -> None:
        if self._give_hook_back is not None:
            self._give_hook_back()
        applied, self.applied = self.applied, None
        if applied is not None:
            applied.remove()
