"""``gacp_model_parallel`` and ``gacp_fsdp``: exact accumulation where every micro-batch reduces its gradients."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import _StrategyRegistry
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_gacp.strategies.lookahead import KEY
from lightning_gacp.strategies.mixin import AccumulationMixin
from lightning_gacp.strategies.ranks import SumsOnHost
from lightning_gacp.strategies.sharded_checkpoint import (
    copy_whole,
    distribute_like,
    read_shards,
    remove_other_shards,
    state_left_alone,
    write_shards,
)
from lightning_gacp.strategies.single_device import register
from lightning_gacp.strategies.unwrapped import unwrapped


class _ZerosInto(torch.autograd.Function):
    """A zero whose backward sends exact zeros into the graphs of its arguments."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.shapes = [(output.shape, output.dtype) for output in outputs]
        ctx.device = outputs[0].device
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=ctx.device) for shape, dtype in ctx.shapes)


class ShardedAccumulation(SumsOnHost, AccumulationMixin):
    """What the sharded strategies share: a micro-batch without items takes part in the collectives of its backward.

    Zeros go through the graph of the module's own forward, from the outputs of its children: from the loss on, a mean
    over no items would make NaN of them.
    """

    _capture: list[Any]

    def setup(self, trainer: Trainer) -> None:
        """Sets the strategy up and watches the outputs of the module's children."""
        self._outputs: list[Tensor] = []
        super().setup(trainer)
        if not self.settings.average_across_ranks and self._ranks > 1:
            raise MisconfigurationException(
                f"`average_across_ranks=False` does not work with `{type(self).__name__}`: each micro-batch's gradients"
                " are averaged over ranks before the rank's own count is known. Use `average_across_ranks=True`."
            )
        self._capture = []
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.lightning_module is not None
            children = self.lightning_module.children()
            self._capture = [child.register_forward_hook(self._keep_output) for child in children]

    def _keep_output(self, module: nn.Module, args: Any, output: Any) -> None:
        # Only where it may be needed: holding outputs costs memory.
        current = self._current
        if current is None or not torch.is_grad_enabled():
            return
        if isinstance(current.items, float) and current.items > 0:
            return
        found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._outputs += [tensor for tensor in found if tensor.ndim] or found

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's step; what was kept of an earlier one is dropped."""
        self._outputs.clear()
        return super().training_step(*args, **kwargs)

    def _backward_without_items(self, loss: Tensor, optimizer: Optimizer | None) -> None:
        if not self._outputs and self._ranks == 1:
            return
        sources = self._outputs or [loss]
        zero: Any = _ZerosInto.apply(*sources)  # type: ignore[no-untyped-call]
        self._outputs.clear()
        zero.backward()

    def teardown(self) -> None:
        """Stops watching."""
        for handle in getattr(self, "_capture", []):
            handle.remove()
        super().teardown()


class GACPModelParallelStrategy(ShardedAccumulation, ModelParallelStrategy):
    """Exact accumulation with FSDP2 and tensor parallelism, as ``configure_model`` sets them up.

    The arguments are those of ``AccumulationMixin``, then those of ``ModelParallelStrategy``, and:

    Args:
        defer_gradient_sync: Reduce gradients once a cycle instead of at every micro-batch. Saves communication and
            costs memory: every rank then holds the gradients of the whole model, unsharded, while a cycle is open.
        **kwargs: For ``AccumulationMixin`` and ``ModelParallelStrategy``.
    """

    strategy_name = "gacp_model_parallel"
    _folder_written: str | None = None  # by the last checkpoint, of an open cycle's gradients

    def __init__(self, defer_gradient_sync: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.defer_gradient_sync = defer_gradient_sync
        self._scales_after_last_backward = defer_gradient_sync

    @property
    def _ranks(self) -> int:
        return int(self.device_mesh["data_parallel"].size())

    @property
    def _rank(self) -> int:
        return int(self.device_mesh["data_parallel"].get_local_rank())

    @property
    def _cannot_carry(self) -> str:
        return "with `defer_gradient_sync=True` its gradients are out of reach" if self.defer_gradient_sync else ""

    def _ranks_may_be_missing(self) -> str:
        return ""  # to gather or write the weights themselves takes all ranks here

    def _for_checkpoint(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        return gradients if self._save_distributed_checkpoint else [copy_whole(gradient) for gradient in gradients]

    def _from_checkpoint(self, gradient: Tensor, parameter: Tensor) -> Tensor:
        return distribute_like(parameter, super()._from_checkpoint(gradient, parameter))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state for a checkpoint, also before its first step."""
        raw = unwrapped(optimizer)
        gate = next((gate for gate in self._gates if gate.optimizer is raw), None)
        stepped = gate is not None and gate.stepped_for_real
        with state_left_alone(raw), nullcontext() if gate is None else gate.let_through():
            state = super().optimizer_state(raw)
        if gate is not None:
            gate.stepped_for_real = stepped  # torch may have made a step of its own to see what the state is like
        return state

    def _cycle_state(self) -> dict[str, Any]:
        unstepped = [i for i, gate in enumerate(self._gates) if not gate.optimizer.state]
        return {**super()._cycle_state(), "unstepped": unstepped}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint; an optimizer that had not stepped yet has no state again."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if self._fitting:
            for i in (self._to_restore or {}).get("unstepped", ()):
                self._gates[i].optimizer.state.clear()
        return checkpoint

    def _write_gradients(self, cycle: dict[str, Any], filepath: Any) -> None:
        if self._save_distributed_checkpoint:
            path = Path(self.broadcast(filepath))
            self._folder_written = cycle["folder"] = f"{KEY}/{self._trainer.fit_loop.epoch_loop.total_batch_idx}"
            cycle.update(write_shards(path, cycle["folder"], cycle["gradients"], cycle["aside"], self.is_global_zero))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Saves a checkpoint; under FSDP2 the gradients of an open cycle go into a folder of its own in it."""
        self._folder_written = None
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._save_distributed_checkpoint and self.is_global_zero:
            remove_other_shards(Path(filepath) / KEY, self._folder_written)

    def _folder(self, cycle: dict[str, Any]) -> Path:
        return Path(self.broadcast(self._restored_from)) / str(cycle.get("folder"))

    def _unreadable(self, cycle: dict[str, Any]) -> str:
        return "" if self._folder(cycle).is_dir() else super()._unreadable(cycle)

    def _read_gradients(self, cycle: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if isinstance(cycle["gradients"], dict):
            return super()._read_gradients(cycle)
        return read_shards(self._folder(cycle), cycle, [gate.parameters for gate in self._gates])

    @property
    def _duplicates(self) -> int:
        return int(self.device_mesh["tensor_parallel"].size())

    def setup(self, trainer: Trainer) -> None:
        """Sets the strategy up."""
        super().setup(trainer)
        if self.defer_gradient_sync and self._manual and len(self._gates) > 1:
            raise MisconfigurationException(
                "`defer_gradient_sync=True` cannot keep the gradients of several optimizers apart: they are not in"
                " `.grad` while a cycle is open. Use `defer_gradient_sync=False`."
            )

    def _synced(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.block_backward_sync()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Holds the reduction of gradients back, where ``defer_gradient_sync`` asks for it."""
        assert self.model is not None
        roots = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        if not self.defer_gradient_sync:
            roots = []
        for module in roots:
            module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for module in roots:
                module.set_requires_gradient_sync(True, recurse=False)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers ``gacp_model_parallel``."""
        register(strategy_registry, cls.strategy_name, cls, "Exact accumulation with FSDP2 and DTensor")


class GACPFSDPStrategy(ShardedAccumulation, FSDPStrategy):
    """Exact gradient accumulation with Lightning's ``FSDPStrategy``: the mixin over a strategy, and nothing else.

    The arguments are those of ``AccumulationMixin``, then those of ``FSDPStrategy``.
    """

    strategy_name = "gacp_fsdp"

    @property
    def _ranks(self) -> int:
        return self.world_size

    def gradients_are_views(self) -> bool:
        """Gradients are views of the flat gradient of their FSDP unit."""
        return True

    @property
    def _rank(self) -> int:
        return self.global_rank

    @property
    def _cannot_carry(self) -> str:
        return "`FSDPStrategy` keeps gradients in flat shards, which no other number of ranks could read"

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers ``gacp_fsdp``."""
        register(strategy_registry, cls.strategy_name, cls, "Exact gradient accumulation with FSDP")
