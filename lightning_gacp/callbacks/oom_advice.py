"""On out of memory: says in which phase, with what peak, and which settings to change next, as YAML."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_gacp.callbacks.block_costs import BlockCosts
from lightning_gacp.callbacks.device_memory import peak_allocated
from lightning_gacp.callbacks.terminal import size_text
from lightning_gacp.callbacks.treatment import Treatment, treatments

SHOWN = 3
"""So many remedies are shown."""

_WORDS = ("out of memory", "can't allocate memory")
"""What back ends say that raise no error of their own: ROCm's libraries, and the allocator of the CPU."""

_BATCHES = {
    "validation": ("val_dataloader", "val_batch_size"),
    "the test": ("test_dataloader", "test_batch_size"),
    "prediction": ("predict_dataloader", "predict_batch_size"),
}
"""Phases without a backward: where their batches come from."""


class Remedy(NamedTuple):
    """One setting to change.

    Attributes:
        what: What it does and costs, one line.
        yaml: The setting, as YAML.
        saves: Predicted bytes on this rank's device; ``None`` where they are unknown.
    """

    what: str
    yaml: str
    saves: int | None


class OOMAdvice(Callback):
    """Adds advice to an out-of-memory error: the phase, the peak, and the next three settings to change.

    Each is given as YAML for LightningCLI with the bytes it is predicted to save, cheapest first. What the blocks save
    is counted on the first micro-batch of a fit, from shapes: this costs no memory. The error itself is raised on, with
    the advice as a note (Python 3.11 and later; printed to stderr on 3.10).
    """

    def __init__(self) -> None:
        self._phase = "before the first micro-batch"
        self._batch_size: int | None = None
        self._treatments: list[Treatment] = []
        self._costs: BlockCosts | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the blocks, and count the costs of the first that run."""
        self._phase = "before the first micro-batch"
        self._batch_size = None
        self._treatments = treatments(pl_module)
        self._costs = BlockCosts([treatment.block for treatment in self._treatments])

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the phase."""
        self._phase = "the forward"
        try:
            self._batch_size = extract_batch_size(batch)
        except Exception:  # Lightning raises several kinds where a batch has no first dimension
            self._batch_size = None

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Note the phase."""
        self._phase = "the backward"

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Note the phase."""
        self._phase = "the optimizer step"

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Stop counting after the first micro-batch."""
        self._phase = "between two micro-batches"
        if self._costs is not None:
            self._costs.close()

    @override
    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Note the phase."""
        self._phase = "validation"

    @override
    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Note the phase."""
        self._phase = "the test"

    @override
    def on_predict_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Note the phase."""
        self._phase = "prediction"

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Add the advice, where memory has run out."""
        if self._costs is not None:
            self._costs.close()
        if is_out_of_memory(exception):
            attach(exception, self.advice(trainer, pl_module))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave no hook behind."""
        if self._costs is not None:
            self._costs.close()
            self._costs = None

    def advice(self, trainer: Trainer, pl_module: LightningModule) -> str:
        """Return the text of the note."""
        bytes_at_peak = peak_allocated(pl_module.device)
        peak = ""
        if bytes_at_peak is not None:
            peak = f"; at most {size_text(bytes_at_peak)} were allocated on {pl_module.device}"
        lines = [f"lightning_gacp: memory ran out in {self._phase}{peak}. What to change, cheapest first:"]
        for number, remedy in enumerate([*self._remedies(trainer, pl_module)][:SHOWN], start=1):
            saves = "saves an unknown amount" if remedy.saves is None else f"saves about {size_text(remedy.saves)}"
            lines += [f"{number}. {remedy.what}; {saves}:", *(f"     {line}" for line in remedy.yaml.splitlines())]
        return "\n".join(lines)

    def _remedies(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[Remedy]:
        """Yield what can still be done, from cheap to dear."""
        parameters = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
        if self._phase == "the optimizer step":
            yield from self._for_the_step(parameters)
            return
        if self._phase in _BATCHES:
            loader, argument = _BATCHES[self._phase]
            yield Remedy(f"use smaller batches in `{loader}`", f"data: {{{argument}: 1}}  # your own argument", None)
            yield from self._bfloat16(trainer, None)
            return
        settings = getattr(trainer.strategy, "settings", None)
        if settings is not None and not settings.free_gradients:
            freed = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
            yield Remedy(
                "release gradients before the next forward (costs nothing)",
                _strategy("free_gradients: true"),
                freed,
            )
        if self._batch_size is None or self._batch_size > 1:
            yield self._smaller_micro_batches(trainer)
        yield from self._recompute_and_offload()
        yield from self._bfloat16(trainer, _half(self._kept_bytes()))
        yield from self._for_the_step(parameters)

    def _bfloat16(self, trainer: Trainer, saves: int | None) -> Iterator[Remedy]:
        if str(trainer.precision) in ("32-true", "32"):
            yield Remedy("compute in bfloat16 (other rounding)", "trainer: {precision: bf16-mixed}", saves)

    def _smaller_micro_batches(self, trainer: Trainer) -> Remedy:
        cycle = trainer.accumulate_grad_batches
        before = "your own argument" if self._batch_size is None else f"your own argument; it was {self._batch_size}"
        after = "half of it" if self._batch_size is None else str(self._batch_size // 2)
        return Remedy(
            f"halve the micro-batch and double the cycle (same gradient; it was {cycle})",
            f"data: {{batch_size: {after}}}  # {before}\n" + _strategy(f"accumulate_grad_batches: {2 * cycle}"),
            _half(self._kept_bytes()),
        )

    def _recompute_and_offload(self) -> Iterator[Remedy]:
        kept = [t.block.name for t in self._treatments if not t.recomputed]
        if kept:
            if len(kept) == len(self._treatments) > 1:
                # Every second block of each stack: the first, the third and so on.
                places: dict[str, int] = {}
                half = []
                for treatment in self._treatments:
                    place = places.get(treatment.block.stack, 0)
                    places[treatment.block.stack] = place + 1
                    if place % 2 == 0:
                        half.append(treatment.block.name)
                yield Remedy(
                    "recompute every second block (17% more operations in the blocks)",
                    _callback("ActivationCheckpointing", "every_n_layers: 2"),
                    self._saved_bytes(half),
                )
            yield Remedy(
                "recompute every block (33% more operations in the blocks than without)",
                _callback("ActivationCheckpointing", "every_n_layers: 1"),
                self._saved_bytes(kept),
            )
        if self._treatments and not any(t.offloaded for t in self._treatments) and torch.accelerator.is_available():
            # The last block's input is needed at once and stays.
            moved = [t.block.name for t in self._treatments[:-1]]
            inputs = None if self._costs is None else self._costs.of(moved)
            yield Remedy(
                "recompute every block and keep the inputs of the blocks in host memory",
                _callback("ActivationCheckpointing", "every_n_layers: 1, offload: true"),
                None if inputs is None else inputs.input_bytes + (self._saved_bytes(kept) or 0),
            )

    def _for_the_step(self, parameters: list[torch.nn.Parameter]) -> Iterator[Remedy]:
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        yield Remedy(
            "let the optimizer step one tensor at a time (a slower step)",
            "optimizer: {foreach: false}  # an argument of your optimizer",
            size,
        )
        yield Remedy(
            "spread parameters, gradients and optimizer states over two devices (communication)",
            "trainer: {strategy: gacp_fsdp, devices: 2}",
            2 * size,  # half of parameters, gradients and two states
        )

    def _saved_bytes(self, names: list[str]) -> int | None:
        cost = None if self._costs is None else self._costs.of(names)
        return None if cost is None else cost.saved_bytes

    def _kept_bytes(self) -> int | None:
        """What the blocks keep on the device now."""
        if self._costs is None or not self._treatments:
            return None
        inputs = self._costs.of(t.block.name for t in self._treatments if not t.offloaded)
        inside = self._saved_bytes([t.block.name for t in self._treatments if not (t.recomputed or t.offloaded)])
        return None if inputs is None or inside is None else inputs.input_bytes + inside


def _half(size: int | None) -> int | None:
    return None if size is None else size // 2


def _strategy(arguments: str) -> str:
    return f"trainer:\n  strategy:\n    class_path: lightning_gacp.GACPStrategy\n    init_args: {{{arguments}}}"


def _callback(name: str, arguments: str) -> str:
    return f"trainer:\n  callbacks:\n    - class_path: lightning_gacp.{name}\n      init_args: {{{arguments}}}"


def is_out_of_memory(exception: BaseException) -> bool:
    """Whether ``exception`` says that a device's memory has run out; also where a back end raises a plain error."""
    if isinstance(exception, torch.OutOfMemoryError):
        return True
    text = str(exception).lower()
    return isinstance(exception, RuntimeError) and any(words in text for words in _WORDS)


def attach(exception: BaseException, text: str) -> None:
    """Make ``text`` part of what is shown of ``exception``; on rank 0 only where it has to be printed."""
    if sys.version_info >= (3, 11):
        exception.add_note(text)
    else:
        _print_to_stderr(text)


@rank_zero_only
def _print_to_stderr(text: str) -> None:
    print(text, file=sys.stderr)
