"""Checkpoints inside a cycle: the gradients gathered so far, the counts and the position travel with them.

A checkpoint of Lightning's has one more entry, ``lightning_gacp``: a dict of plain numbers and tensors, which Lightning
alone ignores. Outside a cycle it holds a few numbers. Inside one it holds the gathered gradients as well, those that
manual optimization has set aside too: as many bytes as the gradients, that is up to the size of the trainable weights
(in ``grad_dtype``, where that is set).

Gradients are averaged over ranks before they are written, which is equivalent: the step is a mean over ranks of sums
over micro-batches, and a mean of what is the same on all ranks leaves it as it is. With the reference count ``R`` (see
``accumulation/cycle.py``) a gradient stands for ``sum n_i L_i / (R W)``, so on another number of ranks ``R W`` is kept.
"""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_gacp.strategies.lookahead import KEY, trained_batches
from lightning_gacp.strategies.micro_batch import MicroBatches

_VERSION = 1


class CycleCheckpoints(MicroBatches):
    """Writes the cycle into Lightning's checkpoints, and takes it up again."""

    _to_restore: dict[str, Any] | None = None
    _restored_from: Any = None  # the checkpoint's path
    _carried: tuple[int, int] | None = None  # (cycle, its micro-batches) that the last checkpoint holds

    # ---------------------------------------------------------------- what the parallel strategies override

    @property
    def _cannot_carry(self) -> str:
        """Why a checkpoint cannot hold the gradients of an open cycle; empty if it can."""
        if self._ranks > 1 and not self._cycle.average_across_ranks:
            return "with `average_across_ranks=False` every rank has gradients of its own, and one file holds one set"
        return ""

    def _for_checkpoint(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Copies gradients to the host, averaged over ranks; a collective call, whose result counts on rank 0."""
        return [None if gradient is None else gradient.detach().to("cpu", copy=True) for gradient in gradients]

    def _from_checkpoint(self, gradient: Tensor, parameter: Tensor) -> Tensor:
        """Makes a gradient of ``parameter`` of what ``_for_checkpoint`` gave."""
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        return gradient.to(parameter.device, dtype, copy=True)

    def _write_gradients(self, cycle: dict[str, Any], filepath: Any) -> None:
        """Called before a checkpoint with ``cycle`` in it is written: its gradients may go elsewhere."""

    def _unreadable(self, cycle: dict[str, Any]) -> str:
        """Why the gradients of a checkpoint cannot be read; empty if they can."""
        if isinstance(cycle["gradients"], dict):
            return ""
        return "the checkpoint was written in shards, and those of the gradients are not here"

    def _read_gradients(self, cycle: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The gradients of a checkpoint, and those set aside, by optimizer and place in it."""
        return cycle["gradients"], cycle["aside"]

    # ---------------------------------------------------------------- saving

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Saves a checkpoint, with the open cycle in it unless it holds weights only."""
        if self._fitting and "optimizer_states" in checkpoint:
            state = self._cycle_state()
            if "cycle" in state:
                self._write_gradients(state["cycle"], filepath)
            checkpoint = {**checkpoint, KEY: state}  # the hooks of modules and callbacks may have kept theirs
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _cycle_state(self) -> dict[str, Any]:
        if self._to_restore is not None:  # a checkpoint at the very start of a resumed run: what it resumes from
            return self._passed_on(self._to_restore)
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        state: dict[str, Any] = {
            "version": _VERSION,
            "cycles": self._cycles,
            "lost_micro_batches": self.lost_micro_batches,
            "epoch": self._trainer.fit_loop.epoch_progress.current.ready,
            "ready": progress.current.ready,
        }
        running = progress.current.ready > trained_batches(self._trainer)
        # The books turn to a micro-batch in the strategy's hook, after those of callbacks, which see the last one here.
        begun = self._current if self._current and self._current.ready == progress.current.ready else None
        if running and begun and self._has_stepped:
            state["stepped"] = True
        elif running and begun and begun.step is not None:
            # In mid-backward: what is gathered is neither of before nor of after this micro-batch.
            # It will be run again, if the loader can resume.
            state["lost"] = self._cycle.losses - begun.has_loss
            state["why"] = "the checkpoint was written while a micro-batch of the cycle was running"
        elif not self._cycle.open:
            return state
        elif progress.is_last_batch:
            state["lost"], state["why"] = self._cycle.losses, "the epoch ended inside a cycle"
        elif why := self._cannot_carry or self._ranks_may_be_missing():
            state["lost"], state["why"] = self._cycle.losses, why
            if not self._ranks_may_be_missing():
                rank_zero_warn(
                    f"A checkpoint was written inside a cycle, and holds the weights of its beginning: {why}."
                    f" A run resumed from it will be without these {self._cycle.losses} micro-batches."
                )
        else:
            state["cycle"] = self._open_cycle_state()
            self._carried = (self._cycles, self._cycle.micro_batches)
        return state

    def _passed_on(self, state: dict[str, Any]) -> dict[str, Any]:
        if "cycle" not in state or self._unreadable(state["cycle"]):
            return state
        gradients, aside = self._read_gradients(state["cycle"])
        return {**state, "cycle": {**state["cycle"], "gradients": gradients, "aside": aside}}

    def _ranks_may_be_missing(self) -> str:
        """After an exception other ranks may not come here, and a collective would wait for them."""
        error = sys.exc_info()[1]
        if self._ranks == 1 or not self._trainer.interrupted or isinstance(error, SIGTERMException):
            return ""
        return "an exception on one of several ranks does not let them average their gradients"

    def _open_cycle_state(self) -> dict[str, Any]:
        cycle = self._cycle
        loss = self._running_loss.total
        items, without_items, loss_sum = self._sum_over_ranks(
            [cycle.items, cycle._losses_without_items, 0.0 if loss is None else float(loss)]
        )
        parameters = [gate.parameters for gate in self._gates]
        gradients = self._for_checkpoint([parameter.grad for group in parameters for parameter in group])
        aside = self._for_checkpoint([gate.aside.get(p) for gate in self._gates for p in gate.parameters])
        names = [f"{i}.{j}" for i, group in enumerate(parameters) for j in range(len(group))]
        scaler = getattr(self.precision_plugin, "scaler", None)
        return {
            "ranks": self._ranks,
            "loss_reduction": cycle.loss_reduction,
            "micro_batches": cycle.micro_batches,
            "losses": cycle.losses,
            "items": items,
            "losses_without_items": without_items,
            "reference": cycle.reference,
            "loss": None if loss is None else loss_sum,
            "total_of_cycle": self._total_of_cycle,
            "scale": None if scaler is None else scaler.get_scale(),
            "gates": [gate.state_dict() for gate in self._gates],
            # by optimizer and place in it, as the optimizers' own states are
            "gradients": {name: value for name, value in zip(names, gradients, strict=True) if value is not None},
            "aside": {name: value for name, value in zip(names, aside, strict=True) if value is not None},
        }

    # ---------------------------------------------------------------- loading

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a checkpoint, and keeps the cycle in it until training starts: Lightning zeroes gradients before."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if self._fitting:
            self._to_restore, self._restored_from = checkpoint.pop(KEY, None), checkpoint_path
        return checkpoint

    def _restore_cycle(self) -> None:
        """Continues inside the cycle that the checkpoint was written in, if any."""
        state, self._to_restore = self._to_restore, None
        loop = self._trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        # A tuner may have run in between, which starts from the first micro-batch.
        here = (loop.epoch_progress.current.ready, progress.current.ready)
        if state is None or here != (state["epoch"], state["ready"]):
            if state is None and loop.epoch_loop.restarting and not progress.is_last_batch:
                done = trained_batches(self._trainer) % self._trainer.accumulate_grad_batches
                self._lose(done, "the checkpoint was written inside a cycle, without this package")
            return
        self._cycles = state["cycles"]
        self.lost_micro_batches = state["lost_micro_batches"]
        cycle = state.get("cycle")
        if state.get("stepped"):
            rank_zero_warn(
                "The checkpoint was written after a step of the optimizer and before the end of its micro-batch, which"
                " is trained on once more, in a step of its own. Save in `on_train_batch_end` instead."
            )
        elif cycle is None:
            self._lose(state.get("lost", 0), state.get("why", ""))
        elif why := self._cannot_continue(cycle, trained_batches(self._trainer)):
            self._lose(cycle["losses"], why)
        else:
            self._continue_cycle(cycle)

    def _cannot_continue(self, state: dict[str, Any], trained: int) -> str:
        gates = state["gates"]
        length = self._trainer.accumulate_grad_batches
        other_ranks = state["ranks"] != self._ranks
        if len(gates) != len(self._gates) or state["loss_reduction"] != self._cycle.loss_reduction:
            return "the checkpoint's cycle was of other optimizers or of another `loss_reduction`"
        if trained % length == 0:
            return f"the checkpoint's cycle was longer than one of {length} micro-batches"
        if other_ranks and self._cycle.loss_reduction == "prescaled":
            return (
                f"the checkpoint is of {state['ranks']} ranks, and these are {self._ranks}: its losses were divided by"
                " the items of a cycle that is now another one"
            )
        if other_ranks and not self._cycle.average_across_ranks:
            return f"with `average_across_ranks=False` a cycle of {state['ranks']} ranks is none of {self._ranks}"
        return self._cannot_carry or self._unreadable(state)

    def _continue_cycle(self, state: dict[str, Any]) -> None:
        ratio = state["ranks"] / self._ranks
        self._cycle.load_state_dict(
            {
                "micro_batches": state["micro_batches"],
                "losses": state["losses"],
                "items": state["items"] / self._ranks,
                "losses_without_items": state["losses_without_items"] / self._ranks,
                "reference": None if state["reference"] is None else state["reference"] * ratio,
            }
        )
        self._total_of_cycle = state["total_of_cycle"]
        loss = None if state["loss"] is None else state["loss"] / self._ranks
        self._running_loss.restore(loss, self.root_device)
        factor = self._change_of_scale(state["scale"])
        gradients, aside = self._read_gradients(state)
        for i, (gate, books) in enumerate(zip(self._gates, state["gates"], strict=True)):
            gate.load_state_dict(books)
            for j, parameter in enumerate(gate.parameters):
                name = f"{i}.{j}"
                if name in gradients:
                    parameter.grad = self._from_checkpoint(gradients[name] * factor, parameter)
                if name in aside:
                    gate.aside.set(parameter, self._from_checkpoint(aside[name] * factor, parameter))

    def _change_of_scale(self, scale: float | None) -> float:
        scaler = getattr(self.precision_plugin, "scaler", None)
        new = 1.0 if scaler is None else scaler.get_scale()
        return float(new / (scale or 1.0))
