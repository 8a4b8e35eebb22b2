"""The language model example runs with each of its configs, and its benchmarks print what is true."""

from __future__ import annotations

import math
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"

Load = Callable[[str], Any]


def overlays(*names: str) -> list[str]:
    return [part for name in ("base", *names) for part in ("-c", str(CONFIGS / f"{name}.yaml"))]


def test_paragraphs_are_real_and_ragged(example: Load) -> None:
    """The data are what the README says they are, on every supported Python: pieces of all lengths, of all the text."""
    lengths = [len(piece) for piece in example("train_lm").paragraphs(256)]
    assert sum(lengths) > 400_000
    assert max(lengths) == 256
    assert min(lengths) < 10


def test_a_batch_is_padded_to_its_longest_paragraph(example: Load) -> None:
    batch = example("train_lm").collate([b"abc", b"z"])
    start, pad = example("train_lm").START, example("train_lm").PADDING
    assert batch["ids"].tolist() == [[start, 97, 98], [start, start, start]]
    assert batch["labels"].tolist() == [[97, 98, 99], [122, pad, pad]]


def test_the_model_is_causal(example: Load) -> None:
    """Logits at a place do not depend on later bytes."""
    model = example("train_lm").ByteGPT(width=16, depth=2, heads=2, context=8)
    ids = torch.randint(256, (1, 8))
    changed = ids.clone()
    changed[:, 5:] = 0
    torch.testing.assert_close(model(ids)[:, :5], model(changed)[:, :5])


def test_no_paragraph_is_in_two_splits(example: Load) -> None:
    data = example("train_lm").Paragraphs()
    data.setup("fit")
    pieces = example("train_lm").paragraphs(256)
    assert len(data.train) + len(data.val) + len(data.test) == len(pieces)
    assert sorted(data.train + data.val + data.test) == sorted(pieces)


CONFIGS_TO_TRY = [(), ("accumulate",), ("checkpoint",), ("accumulate", "checkpoint"), ("accumulate", "offload")]


@pytest.mark.parametrize("names", CONFIGS_TO_TRY, ids=lambda names: "+".join(names) or "base")
@pytest.mark.filterwarnings("ignore:.*no accelerator.*")
def test_runs_with_each_config(example: Load, tiny: list[str], names: tuple[str, ...]) -> None:
    """Each combination trains for an epoch, counts optimizer steps and ends with a held-out perplexity."""
    cli = example("train_lm").main(["fit", *overlays(*names), *tiny])
    steps = 9 if "accumulate" not in names else 3  # 36 training pieces in 9 micro-batches: cycles of 4, 4 and 1
    assert cli.trainer.global_step == steps
    metrics = cli.trainer.callback_metrics
    assert math.isclose(math.exp(metrics["test/loss"]), metrics["test/perplexity"], rel_tol=1e-4)


def test_all_configs_give_the_same_training(example: Load, tiny: list[str]) -> None:
    """Recomputation changes memory and nothing else: the weights after an epoch are the same to the bit."""
    plain = example("train_lm").main(["fit", *overlays("accumulate"), *tiny]).model
    recomputed = example("train_lm").main(["fit", *overlays("accumulate", "checkpoint"), *tiny]).model
    for (name, left), (other, right) in zip(plain.named_parameters(), recomputed.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(left, right), name


@pytest.mark.filterwarnings("ignore:.*no accelerator.*")
def test_make_train_is_this_example(example: Load, tiny: list[str]) -> None:
    """The command behind `make train`, cut short, runs; it accumulates, recomputes and offloads."""
    printed = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "train"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (command,) = [line for line in printed.replace("\\\n", " ").splitlines() if "examples/train_lm.py" in line]
    arguments = shlex.split(command.split("examples/train_lm.py")[1])
    arguments = [str(ROOT / part) if part.endswith(".yaml") else part for part in arguments]
    trainer = example("train_lm").main([*arguments, *tiny]).trainer
    assert type(trainer.strategy).__name__ == "GACPStrategy"
    assert "ActivationCheckpointing" in [type(callback).__name__ for callback in trainer.callbacks]
    assert trainer.global_step == 3


@pytest.mark.parametrize("every_n_layers", [None, 1, 2, 4])
def test_saved_bytes_are_what_shapes_predict(benchmark_script: Load, every_n_layers: int | None) -> None:
    """Equal to the byte on the CPU; and a wrong count of blocks would show, since each is 18 times its input."""
    sizes = {"batch": 3, "time": 40, "width": 24, "heads": 3, "depth": 6}
    script = benchmark_script("saved_bytes")
    measured = script.measure(**sizes, every_n_layers=every_n_layers)
    assert measured == script.predict(**sizes, classes=256, every_n_layers=every_n_layers)


def test_the_gradient_of_a_cycle_is_that_of_one_big_batch(benchmark_script: Load) -> None:
    """On the example's paragraphs: below 1e-6 in both modes, with a short last cycle; Lightning's own is far off."""
    script = benchmark_script("accumulation_error")
    sizes = {"width": 16, "depth": 2, "heads": 2, "context": 256}
    data = script.micro_batches(4, 1, 256)
    for manual in (False, True):
        assert max(script.errors(data, 3, True, manual, **sizes)) < 1e-6
    assert min(script.errors(data, 3, False, False, **sizes)) > 0.05
