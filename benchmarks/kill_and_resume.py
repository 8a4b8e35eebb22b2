"""Kill training anywhere, resume it, and compare it bit by bit with a run that was never stopped.

    python benchmarks/kill_and_resume.py

Each run is a process of its own. SIGKILL: it writes a checkpoint at the end of one micro-batch and trains on until it
is killed; once for every micro-batch of two epochs of 11, in cycles of 4, 4 and 3. SIGTERM: it is sent at a random
time; Lightning ends the run after the micro-batch in which it comes, and the checkpoint is that of its
``OnExceptionCheckpoint``. Every interrupted run is resumed in another process, from a loader that can resume, to its
end. Compared are the weights and all that AdamW remembers. What a run leaves behind is looked for as well: files beside
the checkpoint, shared memory, processes.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_gacp as gacp

LENGTHS = [5, 3, 0, 7, 2, 9, 4, 6, 1, 8, 3]  # targets of each micro-batch
CYCLE, EPOCHS, WORDS, WIDTH = 4, 2, 11, 8
TOTAL = len(LENGTHS) * EPOCHS
PAUSE = 0.004  # seconds in each micro-batch of a run that is to be sent a signal while it trains
CHECKPOINT = "saved.ckpt"


class Order:
    """Another order of the micro-batches in every epoch, which Lightning tells it, as it tells torch's samplers."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch that begins."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(len(LENGTHS)), len(LENGTHS)))


class Resumable:
    """A shuffled stream of ragged micro-batches that goes on where the run that wrote the checkpoint stood."""

    def __init__(self) -> None:
        self.sampler = Order()
        self.position, self.resumes = 0, False

    def __len__(self) -> int:
        return len(LENGTHS)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if not self.resumes:
            self.position = 0
        self.resumes = False
        order = list(self.sampler)
        while self.position < len(order):
            self.position += 1
            yield micro_batch(order[self.position - 1])

    def state_dict(self) -> dict[str, int]:
        """Where in the epoch it stands."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on there, or, if that is the end, with the next epoch."""
        self.position = state["position"]
        self.resumes = self.position < len(LENGTHS)


def micro_batch(number: int) -> dict[str, Tensor]:
    """Two rows, of whose tokens ``LENGTHS[number]`` are targets."""
    generator = torch.Generator().manual_seed(number)
    width = max(-(-LENGTHS[number] // 2), 1)
    inputs, labels = torch.randint(WORDS, (2, 2, width), generator=generator)
    labels.view(-1)[LENGTHS[number] :] = -100
    return {"inputs": inputs, "labels": labels}


class Model(L.LightningModule):
    """A few layers, AdamW, a schedule and clipping: a resumption that forgets anything shows in the weights."""

    def __init__(self, manual: bool, pause: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)
        )
        self.automatic_optimization = not manual
        self.pause = pause

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        """The loss; in manual optimization, also the step."""
        time.sleep(self.pause)
        loss = F.cross_entropy(self.net(batch["inputs"]).flatten(0, 1), batch["labels"].flatten())
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()
        return None

    def configure_optimizers(self) -> Any:
        """AdamW, whose learning rate falls at every step."""
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Reports(L.Callback):
    """Tells the parent when training has begun, and when the checkpoint of micro-batch ``at`` is written."""

    def __init__(self, parent: Connection, folder: Path, at: int | None) -> None:
        self.parent, self.folder, self.at = parent, folder, at

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Training has begun."""
        self.parent.send("started")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Saves at the micro-batch asked for."""
        if trainer.fit_loop.total_batch_idx + 1 == self.at:
            trainer.save_checkpoint(self.folder / CHECKPOINT)
            self.parent.send("saved")


def train(parent: Connection, manual: bool, folder: Path, at: int | None, resumes: bool, pause: float) -> None:
    """What a child process does: train to the end, and send the state of the end."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    module = Model(manual, pause)
    strategy = gacp.GACPStrategy(accumulate_grad_batches=CYCLE, num_items="labels")
    trainer = L.Trainer(
        strategy=strategy,
        max_epochs=EPOCHS,
        gradient_clip_val=None if manual else 0.5,
        callbacks=[Reports(parent, folder, at), OnExceptionCheckpoint(folder, Path(CHECKPOINT).stem)],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, Resumable(), ckpt_path=folder / CHECKPOINT if resumes else None, weights_only=True)
    except SIGTERMException:
        sys.exit(1)  # as an uncaught one would, without its traceback
    optimizer = trainer.optimizers[0]
    state = [p.detach() for p in module.parameters()]
    state += [value for each in optimizer.state.values() for value in each.values()]
    parent.send(([value.numpy() for value in state], trainer.global_step, strategy.lost_micro_batches))
    signal.pause()  # until it is killed


class Run:
    """A child process that trains. It is forked: torch and Lightning are imported once."""

    def __init__(
        self, manual: bool, folder: Path, at: int | None = None, resumes: bool = False, pause: float = 0.0
    ) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=train, args=(theirs, manual, folder, at, resumes, pause), daemon=True)
        self.process.start()
        theirs.close()

    def wait_for(self, message: str) -> None:
        """Waits until it says so."""
        while self.connection.recv() != message:
            pass

    def result(self) -> Any:
        """Waits for its end; the state of the end."""
        while isinstance(found := self.connection.recv(), str):
            pass
        self.stop(signal.SIGKILL)
        return found

    def stop(self, number: int) -> int:
        """Sends a signal and waits until the process is gone; its exit code."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        self.process.join(5)
        if self.process.exitcode is None:  # it came while Lightning took its handlers off, at the end of the fit
            self.process.kill()
            self.process.join()
        return self.process.exitcode or 0


def same(found: Any, expected: Any) -> bool:
    """Whether weights and optimizer state are equal bit by bit, after as many steps and with nothing lost."""
    (ours, *counts), (theirs, *counts_expected) = found, expected
    equal = all((a == b).all() for a, b in zip(ours, theirs, strict=True))
    return bool(equal and counts == counts_expected)


def left_over(folder: Path) -> list[str]:
    """What is in ``folder`` beside the checkpoint, and in the shared memory of the machine."""
    beside = [path.name for path in folder.iterdir() if path.name != CHECKPOINT]
    shared = Path("/dev/shm")
    return beside + [path.name for path in (shared.glob("torch_*") if shared.exists() else ())]


class Outcome(NamedTuple):
    """Of an interrupted run."""

    inside: bool  # whether the checkpoint holds an open cycle
    equal: bool  # whether the resumed run ended like one that was not interrupted
    left: list[str]  # what was left behind


def killed(manual: bool, at: int, expected: Any) -> Outcome:
    """SIGKILL after the checkpoint of micro-batch ``at``."""
    with tempfile.TemporaryDirectory() as name:
        run = Run(manual, Path(name), at)
        run.wait_for("saved")
        assert run.stop(signal.SIGKILL) == -signal.SIGKILL
        return _resumed(manual, Path(name), expected)


def terminated(manual: bool, after: float, expected: Any) -> Outcome:
    """SIGTERM ``after`` so many seconds of training; earlier, should a busy machine have let the run end before."""
    while True:
        with tempfile.TemporaryDirectory() as name:
            run = Run(manual, Path(name), pause=PAUSE)
            run.wait_for("started")
            time.sleep(after)
            code = run.stop(signal.SIGTERM)
            if code == 1:  # Lightning ends a run that is terminated with an exception
                return _resumed(manual, Path(name), expected)
        after /= 2


def _resumed(manual: bool, folder: Path, expected: Any) -> Outcome:
    inside = "cycle" in torch.load(folder / CHECKPOINT, weights_only=True)["lightning_gacp"]
    left = left_over(folder)
    return Outcome(inside, same(Run(manual, folder, resumes=True).result(), expected), left)


def whole(manual: bool) -> Any:
    """The state at the end of a run that was never stopped."""
    with tempfile.TemporaryDirectory() as name:
        return Run(manual, Path(name)).result()


def sizes() -> str:
    """What the open cycle adds to a checkpoint, in words."""
    found = {}
    for at in (CYCLE - 1, CYCLE):
        with tempfile.TemporaryDirectory() as name:
            run = Run(False, Path(name), at)
            run.wait_for("saved")
            run.stop(signal.SIGKILL)
            checkpoint = torch.load(Path(name) / CHECKPOINT, weights_only=True)
        entry = checkpoint["lightning_gacp"]
        kinds = (entry.get("cycle", {}).get(kind, {}) for kind in ("gradients", "aside"))
        tensors = [tensor for kind in kinds for tensor in kind.values()]
        found[at] = sum(map(size, tensors)), len(str({**entry, "cycle": None}))
    weights = sum(map(size, checkpoint["state_dict"].values()))
    return (
        f"in a checkpoint inside a cycle: {found[CYCLE - 1][0]:,} B of gradients, for {weights:,} B of weights;"
        f" between two cycles: {found[CYCLE][0]} B, and {found[CYCLE][1]} characters of counts"
    )


def size(tensor: Tensor) -> int:
    """Bytes of its values."""
    return tensor.numel() * tensor.element_size()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--terminations", type=int, default=30, help="runs that are sent SIGTERM, in each mode")
    parser.add_argument("--seed", type=int, default=0, help="of the times at which they are sent it")
    arguments = parser.parse_args()
    times = random.Random(arguments.seed)
    print(
        f"cycles of {CYCLE} micro-batches, {EPOCHS} epochs of {len(LENGTHS)}; equal: weights and optimizer, bit by bit"
    )
    print("signal   mode       runs  saved inside a cycle  equal  left behind")
    for manual in (False, True):
        expected = whole(manual)
        span = TOTAL * PAUSE * 0.9
        runs = {
            "SIGKILL": [killed(manual, at, expected) for at in range(1, TOTAL)],
            "SIGTERM": [terminated(manual, times.uniform(0, span), expected) for _ in range(arguments.terminations)],
        }
        for name, found in runs.items():
            inside, equal = sum(each.inside for each in found), sum(each.equal for each in found)
            left = sum(len(each.left) for each in found)
            mode = "manual" if manual else "automatic"
            print(f"{name}  {mode:<9}  {len(found):>4}  {inside:>20}  {equal:>5}  {left:>11}")
    print(sizes())


if __name__ == "__main__":
    main()
