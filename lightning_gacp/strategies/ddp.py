"""``gacp_ddp``: exact accumulation over the ranks of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies import _StrategyRegistry
from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_gacp.accumulation.gradients import zero_loss
from lightning_gacp.strategies.mixin import AccumulationMixin
from lightning_gacp.strategies.ranks import SumsOnHost, average_over_ranks
from lightning_gacp.strategies.single_device import register


class GACPDDPStrategy(SumsOnHost, AccumulationMixin, DDPStrategy):
    """Exact gradient accumulation with DistributedDataParallel: one all-reduce of the gradients a cycle.

    The arguments are those of ``AccumulationMixin``, then those of ``DDPStrategy``.
    """

    strategy_name = "gacp_ddp"
    _first_backward_is_synced = False

    def setup(self, trainer: Trainer) -> None:
        """Sets up DDP; refuses what its reducer cannot do."""
        if self.settings.grad_dtype is not None:
            raise MisconfigurationException(
                f"`grad_dtype={self.settings.grad_dtype}` does not work with DistributedDataParallel: its reducer"
                " takes gradients in the"
                " parameter's dtype only. Train in `precision='bf16-mixed'` (float32 parameters and gradients), or with"
                ' `strategy="gacp_model_parallel"`.'
            )
        self._first_backward_is_synced = False
        super().setup(trainer)

    @property
    def _ranks(self) -> int:
        return self.world_size

    @property
    def _rank(self) -> int:
        return self.global_rank

    def _for_checkpoint(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        parameters = [parameter for gate in self._gates for parameter in gate.parameters]
        return average_over_ranks(gradients, parameters, self._sum_over_ranks)

    def _synced(self, last: bool) -> AbstractContextManager[Any]:
        if not last:
            return self.block_backward_sync()
        if isinstance(self.model, DistributedDataParallel) and self.model.find_unused_parameters:
            # The reducer remembers which parameters the earlier micro-batches used, and reduces them though this
            # loss may not reach them: what was set aside leaves zeros in its place.
            for gate in self._gates:
                for parameter in gate.aside.parameters():
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
        return nullcontext()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Holds the all-reduce back, except in the first backward of a static graph: torch learns the graph from it.

        What is reduced early is then the same on all ranks, and a mean over ranks leaves it as it is.
        """
        model = self.model
        if not isinstance(model, DistributedDataParallel):
            yield
        elif model.static_graph and not self._first_backward_is_synced:
            self._first_backward_is_synced = True
            yield
        else:
            with model.no_sync():
                yield

    def gradients_are_views(self) -> bool:
        """Whether ``.grad`` may be a view of a bucket of the reducer."""
        return isinstance(self.model, DistributedDataParallel) and self.model.gradient_as_bucket_view

    def _backward_without_items(self, loss: Tensor, optimizer: Optimizer | None) -> None:
        """Takes part in the all-reduce with zeros, from a graph that reaches every parameter that is in use."""
        model = self.model
        if not isinstance(model, DistributedDataParallel) or not model.require_backward_grad_sync:
            return
        zero = zero_loss(self._in_use(model))
        if self._manual or not model.static_graph:
            # With the graph of `loss`, the reducer would take the parameters that are not in it for done.
            prepare_for_backward(model, zero)
        zero.backward()  # type: ignore[no-untyped-call]
        self.post_backward(zero)
        if not self._manual and model.static_graph and not model._static_graph_delay_allreduce_enqueued:
            # The first backward of a static graph is reduced by a callback that a node of DDP's forward queues, and
            # this backward did not pass through that forward.
            model._static_graph_delay_allreduce_enqueued = True
            model.reducer._delay_all_reduce()  # type: ignore[attr-defined]

    def _in_use(self, model: DistributedDataParallel) -> list[Tensor]:
        """The parameters that this cycle has reached, where the reducer looks for those that nobody uses; else all.

        Zeros in the place of no gradient would let the optimizer decay what is used on no rank.
        """
        parameters: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not model.find_unused_parameters:
            return parameters
        # What is set aside has left zeros in its place: see `_synced`.
        used = [parameter for parameter in parameters if parameter.grad is not None]
        return used or parameters[:1]  # the reduction starts at the first of them

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Registers ``gacp_ddp`` and, as Lightning does, its variants."""
        what = "Exact gradient accumulation with DistributedDataParallel"
        register(strategy_registry, "gacp_ddp", cls, what)
        register(
            strategy_registry,
            "gacp_ddp_find_unused_parameters_true",
            cls,
            f"{what}, with `find_unused_parameters`",
            find_unused_parameters=True,
        )
        register(strategy_registry, "gacp_ddp_spawn", cls, f"{what}, with `start_method='spawn'`", start_method="spawn")
        register(strategy_registry, "gacp_ddp_fork", cls, f"{what}, with `start_method='fork'`", start_method="fork")
