"""What a micro-batch costs on top of a bare PyTorch loop: with Lightning's own accumulation, and with ours.

    python benchmarks/accumulation_overhead.py

Three loops over the same micro-batches in one process: a bare loop, ``Trainer(accumulate_grad_batches=8)``, and the
same with ``GACPStrategy``. They take turns, and processor time of one thread is measured, so that other work on the
machine blurs the figures less. Beside the median over turns stands the least: of each of the eight places in a cycle
the shortest micro-batch that was seen there, on average, because other work only ever adds. It also counts host
synchronisations: the reads of a tensor's value (``item``, ``bool``) within micro-batches.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import time
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import lightning_gacp as gacp

CYCLE = 8
Batch = tuple[Tensor, Tensor]


class Classifier(L.LightningModule):
    """A perceptron; its width and batch set how long a micro-batch takes.

    Args:
        width: Of each layer.
        manual: Optimize by hand.
    """

    def __init__(self, width: int, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[torch.nn.Module] = []
        for _ in range(6):
            layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))
        self.automatic_optimization = not manual

    def loss(self, batch: Batch) -> Tensor:
        """Cross entropy, a mean over samples."""
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss; by hand, also the step."""
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(L.Callback):
    """Seconds of processor time at the start of each micro-batch."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the time."""
        self.starts.append(time.process_time())


def make_batches(width: int, size: int, number: int) -> list[Batch]:
    """``number`` micro-batches of ``size`` samples."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, width, generator=generator)
    return [(inputs, torch.randint(10, (size,), generator=generator)) for _ in range(number)]


def bare(width: int, batches: list[Batch]) -> list[float]:
    """Seconds of processor time at the start of each micro-batch of a bare loop."""
    module = Classifier(width)
    optimizer = module.configure_optimizers()
    starts = []
    for i, batch in enumerate(batches):
        starts.append(time.process_time())
        if i % CYCLE == 0:
            optimizer.zero_grad()
        (module.loss(batch) / CYCLE).backward()  # type: ignore[no-untyped-call]
        if (i + 1) % CYCLE == 0:
            optimizer.step()
    return starts


def trained(width: int, batches: list[Batch], ours: bool, manual: bool = False) -> list[float]:
    """Seconds of processor time at the start of each micro-batch under a Trainer."""
    clock = Clock()
    how: dict[str, Any] = {"accumulate_grad_batches": CYCLE}
    if ours:
        how = {"strategy": gacp.GACPStrategy(accumulate_grad_batches=CYCLE)}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
        **how,
    )
    trainer.fit(Classifier(width, manual), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return clock.starts


def timings(width: int, size: int, number: int, turns: int) -> dict[str, list[list[float]]]:
    """Microseconds of every micro-batch of each loop, a list a turn; the loops take turns in rotating order."""
    batches = make_batches(width, size, number)
    loops = {
        "bare loop": lambda: bare(width, batches),
        "Lightning": lambda: trained(width, batches, ours=False),
        "ours": lambda: trained(width, batches, ours=True),
        "ours, manual": lambda: trained(width, batches, ours=True, manual=True),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in loops}
    names = list(loops)
    for name in names:
        loops[name]()  # warm up
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append([(end - start) * 1e6 for start, end in itertools.pairwise(loops[name]())])
    return found


def median(turns: list[list[float]]) -> float:
    """Of the means of the turns."""
    return statistics.median(map(statistics.mean, turns))


def least(turns: list[list[float]]) -> float:
    """Mean over the places in a cycle of the shortest micro-batch there, without the first cycle of a turn."""
    return statistics.mean(min(min(turn[CYCLE + place :: CYCLE]) for turn in turns) for place in range(CYCLE))


class Reads(TorchDispatchMode):
    """Counts reads of tensors' values, each of which would make the host wait for an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass on and count."""
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class CountReads(L.Callback):
    """Reads from the start of a micro-batch to the start of the next: counted on the device's side of the counting."""

    def __init__(self) -> None:
        self.reads = Reads()

    def on_train_batch_start(self, *_: Any) -> None:
        """From here, the batch has been counted on the host and is on the device."""
        self.reads.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        """Until here."""
        self.reads.__exit__(None, None, None)


def synchronisations(ours: bool, manual: bool = False, micro_batches: int = 4 * CYCLE) -> int:
    """Reads of values on the device in a run of ``micro_batches``: hooks, forward, backward and steps."""
    counter = CountReads()
    how: dict[str, Any] = {"accumulate_grad_batches": CYCLE}
    if ours:
        how = {"strategy": gacp.GACPStrategy(accumulate_grad_batches=CYCLE)}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[counter],
        **how,
    )
    data = DataLoader(make_batches(8, 4, micro_batches), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(Classifier(8, manual), data)
    return counter.reads.count


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=25)
    turns = parser.parse_args().turns
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"microseconds of processor time per micro-batch, cycles of {CYCLE}: {turns} turns")
    print(f"{'micro-batch':<14}{'loop':<16}{'median':>10}{'over Lightning':>18}{'least':>10}{'over Lightning':>18}")
    for label, width, size, number in (("about 1 ms", 160, 32, 160), ("about 30 ms", 512, 384, 24)):
        found = timings(width, size, number, turns)
        base = found["Lightning"]
        for name, values in found.items():
            print(
                f"{label:<14}{name:<16}{median(values):>10.1f}{median(values) - median(base):>18.1f}"
                f"{least(values):>10.1f}{least(values) - least(base):>18.1f}"
            )
    print("reads of a value per micro-batch, on the device's side (each would wait for an accelerator)")
    for label, ours, manual in (("Lightning", False, False), ("ours", True, False), ("ours, manual", True, True)):
        print(f"{label:<30}{synchronisations(ours, manual) / (4 * CYCLE):.2f}")


if __name__ == "__main__":
    main()
