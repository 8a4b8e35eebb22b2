"""The books of a cycle: what is written down, where the Trainer stands, and how a cycle ends.

Nothing here is a hook of Lightning's. The strategy is built on it in layers, each in a file of its own:
``micro_batch.py`` enters micro-batches, ``checkpoint.py`` carries the books through checkpoints, ``set_up.py`` begins
and ends a fit, and ``mixin.py`` has the hooks of training, in the order in which a micro-batch goes through them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_gacp.accumulation.cycle import AccumulationCycle, CycleResult, MicroBatch
from lightning_gacp.accumulation.running_loss import RunningLoss
from lightning_gacp.strategies.counting import ItemCount
from lightning_gacp.strategies.gates import OptimizerGate
from lightning_gacp.strategies.settings import Settings

if TYPE_CHECKING:
    _Base = Strategy
else:
    _Base = object


class Current:
    """The micro-batch that runs."""

    __slots__ = (
        "divided_by",
        "fetches",
        "handed_over",
        "has_loss",
        "items",
        "last",
        "length",
        "manual",
        "ready",
        "step",
    )

    def __init__(self, ready: int, length: int, last: bool, items: float | Exception | None, manual: bool) -> None:
        self.ready = ready  # its number in the epoch, from 1
        self.length = length  # Lightning's cycle length
        self.last = last
        self.manual = manual
        self.divided_by = 1.0 if manual else float(length)  # in automatic optimization Lightning divides the loss
        self.items = items
        self.step: MicroBatch | None = None  # once its count has entered the cycle
        self.has_loss = False
        self.handed_over: float | None = None
        self.fetches = False  # whether the module fetches its batches itself


class CycleBooks(_Base):
    """Keeps the cycle, the micro-batch that runs, and a gate for every optimizer."""

    settings: Settings

    def _open_books(self) -> None:
        self._gates: list[OptimizerGate] = []
        self._cycle = AccumulationCycle()
        self._current: Current | None = None
        self._skips_backward = False  # whether this micro-batch is for the statistics of batch norms alone
        self._count: ItemCount | None = None
        self._counted: float | Exception | None = None
        self._running_loss = RunningLoss()
        self._finished = False
        self._step_skipped = False
        self._frees = False
        self._factor_due = 1.0
        self._total_of_cycle = 0.0
        self._cycles = 0
        self._result: CycleResult | None = None
        # The last cycle, until its result is asked for: the first fields of the result, its losses and their items.
        self._ended: tuple[tuple[int, int, float, float, bool], RunningLoss, float] | None = None
        self.lost_micro_batches = 0
        self.skipped_cycles = 0
        self._not_finite = False  # whether this cycle has been found so
        self._skipped_last = -1  # the last cycle that was found so
        self._skipped_in_a_row = 0

    # ---------------------------------------------------------------- what the parallel strategies override

    # Where gradients are out of reach until the last backward has reduced them, the closing factor waits for the step.
    _scales_after_last_backward = False

    @property
    def _ranks(self) -> int:
        """Number of ranks whose gradients are averaged."""
        return 1

    @property
    def _rank(self) -> int:
        """Which of them this is."""
        return 0

    def _sum_over_ranks(self, values: Any) -> Any:
        """Adds up a list of numbers over the ranks whose gradients are averaged, on the host."""
        return values

    def _synced(self, last: bool) -> AbstractContextManager[Any]:
        """Context of a manual backward: holds reductions back until the last micro-batch."""
        return nullcontext()

    def _backward_without_items(self, loss: Tensor, optimizer: Optimizer | None) -> None:
        """Takes the place of a backward whose loss is over no items. Alone, there is nothing to do."""

    def gradients_are_views(self) -> bool:
        """Whether ``.grad`` may be a view of memory that others write."""
        return False

    # ---------------------------------------------------------------- where the Trainer stands

    @property
    def _trainer(self) -> Trainer:
        # By the attributes behind Lightning's properties: this is asked several times a micro-batch.
        assert self._lightning_module is not None and self._lightning_module._trainer is not None
        return self._lightning_module._trainer

    @property
    def _fitting(self) -> bool:
        """Whether a fit runs in this process. Where a launcher's ranks run it, no Trainer is attached to the module."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING

    @property
    def _training(self) -> bool:
        """Whether training runs, not a validation inside it."""
        module = self._lightning_module
        if module is None or module._trainer is None:
            return False
        # Enum members of Lightning's compare as text, which takes longer than all the rest here.
        return module._trainer.state.stage is RunningStage.TRAINING

    def skips_steps(self) -> bool:
        """Whether this pass over the data is for the statistics of batch norms alone.

        Stochastic weight averaging ends with such a pass. Lightning keeps the averaged weights from moving in it in
        automatic optimization only.
        """
        return self._skips_backward and self._manual and self._training

    @property
    def _manual(self) -> bool:
        return self._lightning_module is not None and not self._lightning_module.automatic_optimization

    def _gate_of(self, optimizer: Any) -> OptimizerGate | None:
        for gate in self._gates:
            if gate.optimizer is optimizer:
                return gate
        return None

    def has_one_optimizer(self) -> bool:
        """Whether no other optimizer's loss can leave gradients in an optimizer's parameters."""
        return len(self._gates) == 1

    @property
    def _active(self) -> bool:
        """Whether a micro-batch of training runs (stochastic weight averaging runs some without a backward)."""
        return self._current is not None and self._training

    @property
    def _alone(self) -> bool:
        """Whether the micro-batch that runs is a whole cycle: what it leaves is left as Lightning leaves it."""
        return self._current is not None and self._current.length == 1

    # ---------------------------------------------------------------- ends of cycles

    @property
    def _has_stepped(self) -> bool:
        """Whether all optimizers have stepped in the micro-batch that runs."""
        return bool(self._gates) and all(gate.stepped_for_real for gate in self._gates)

    def _uncount_step(self) -> None:
        """Takes back a step that Lightning counts after this hook, and that was none."""
        loop = self._trainer.fit_loop.epoch_loop
        counted = loop.automatic_optimization.optim_progress.optimizer.step
        if self._manual:
            counted = loop.manual_optimization.optim_step_progress
        for progress in (counted.total, counted.current):
            progress.ready -= 1
            progress.completed -= 1

    @property
    def cycle_result(self) -> CycleResult | None:
        """The last finished cycle; made when it is asked for, because to add up its losses takes time."""
        if self._ended is not None:
            (numbers, loss, items), self._ended = self._ended, None
            self._result = CycleResult(*numbers, loss.mean(items))
        return self._result

    def _finish_cycle(self) -> None:
        """Publishes the result of a closed cycle, once."""
        if self._finished or not self._cycle.closed:
            return
        self._finished = True
        cycle, loss = self._cycle, self._running_loss
        numbers = (self._cycles, cycle.micro_batches, cycle.items, cycle.total_items, not self._step_skipped)
        self._ended = numbers, loss, loss.items_of(cycle)
        self._cycles += 1

    def _start_cycle(self) -> None:
        self._cycle.reset()
        self._finished = self._not_finite = False
        self._current = None
        self._running_loss = RunningLoss()
        for gate in self._gates:
            gate.start_cycle()
            gate.aside.clear()

    def _release_gradients(self) -> None:
        if not self._frees:
            return
        for gate in self._gates:
            if not self._manual or gate.can_release():
                for parameter in gate.parameters:
                    parameter.grad = None

    def _check_regular(self) -> None:
        for gate in self._gates if self._manual else ():
            if gate.irregular() and self._trainer.accumulate_grad_batches > 1:
                raise MisconfigurationException(gate.irregular_message())

    def _check_leaks(self) -> None:
        """At the end of a cycle: what was gathered and never stepped with must not leak into the next one.

        By the books only: gradients that another optimizer's loss has left (a GAN's) are nobody's business.
        """
        if self._current is None or self._current.length == 1:
            return
        leaking = [gate for gate in self._gates if gate.aside or (self.has_one_optimizer() and gate.holds_unstepped())]
        if leaking:
            names = ", ".join(f"`{type(gate.optimizer).__name__}`" for gate in leaking)
            self._lose(self._cycle.losses, f"the cycle ended without a step of {names}")
            self._step_skipped = True
        for gate in leaking:
            for parameter in gate.parameters:
                parameter.grad = None

    def _discard(self, why: str) -> None:
        self._lose(self._cycle.losses, why)
        self._forget()

    def _lose(self, lost: int, why: str) -> None:
        if not lost:
            return
        self.lost_micro_batches += lost
        begin, whose = (f"{lost} micro-batches were", "Their") if lost > 1 else ("1 micro-batch was", "Its")
        rank_zero_warn(f"{begin} lost: {why}. {whose} gradients are discarded; no step was taken with them.")

    def _forget(self) -> None:
        """Drops a cycle that was not stepped with, and its gradients."""
        unfinished = self._cycle.micro_batches > 0 and not self._finished and not self._alone
        self._start_cycle()
        if unfinished:
            for gate in self._gates:
                for parameter in gate.parameters:
                    parameter.grad = None
