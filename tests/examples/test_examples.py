"""The further examples run, cut short, and do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightning_gacp as gacp

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"

Load = Callable[[str], Any]
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu"]


@pytest.fixture(autouse=True)
def _import_from_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that build on another find it, as they do when they are run from their folder."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def test_plain_loop(example: Load) -> None:
    """The loss falls; recomputation changes no digit of it."""
    losses = example("plain_loop").train(steps=6, width=16, every_n_layers=1)
    assert losses[-1] < losses[0] - 0.05
    assert losses == example("plain_loop").train(steps=6, width=16, every_n_layers=3)


@pytest.mark.filterwarnings("ignore:.*BatchNorm.*")
@pytest.mark.filterwarnings("ignore:.*batch norm.*")
def test_digits(example: Load) -> None:
    """Reads most digits after an epoch: batch norm's statistics are usable after recomputation."""
    cli = example("digits").main(["fit", "-c", str(CONFIGS / "digits.yaml"), "--trainer.max_epochs=2", *QUIET])
    assert cli.trainer.callback_metrics["val/accuracy"] > 0.8
    assert cli.trainer.global_step == 2 * 23  # 45 micro-batches an epoch, two a cycle


def test_gan(example: Load, capsys: pytest.CaptureFixture[str]) -> None:
    """Both optimizers step once a cycle."""
    cut = ["--data.batches=12", "--trainer.strategy.init_args.accumulate_grad_batches=3", *QUIET]
    cli = example("gan").main(["fit", "-c", str(CONFIGS / "gan.yaml"), *cut])
    assert cli.trainer.global_step == 2 * 4
    assert re.search(r"radius of the generated points: \d\.\d\d", capsys.readouterr().out)


def test_huggingface(example: Load, capsys: pytest.CaptureFixture[str]) -> None:
    """Encoder and decoder blocks are found, tokens are counted without a setting, and what is saved is known."""
    cut = ["--trainer.limit_train_batches=5", *QUIET]
    trainer = example("huggingface").main(["fit", "-c", str(CONFIGS / "huggingface.yaml"), *cut]).trainer
    assert trainer.global_step == 2
    assert isinstance(trainer.strategy, gacp.GACPStrategy)
    assert "Targets(key='labels'" in trainer.strategy.counting
    printed = capsys.readouterr().out
    assert "model.encoder.block.{0,1}" in printed and "model.decoder.block.{0,1}" in printed
    assert "instead of" in printed


TWO_PROCESSES = {"ddp": "train_lm", "fsdp2": "train_lm_fsdp2"}


@pytest.mark.parametrize(("config", "script"), TWO_PROCESSES.items(), ids=TWO_PROCESSES)
def test_two_processes(config: str, script: str, tiny: list[str], tmp_path: Path) -> None:
    """Two processes on the CPU: the items of both are counted, and only one of them prints."""
    command = [sys.executable, str(ROOT / "examples" / f"{script}.py"), "fit"]
    for name in ("base", config, "monitor"):
        command += ["-c", str(CONFIGS / f"{name}.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *tiny], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cycle: 4 micro-batches an optimizer step") == 1
    # 36 pieces: 9 micro-batches over 2 processes are 5 each, a cycle of 4 and one of 1.
    assert done.stdout.count("2, of 5 micro-batches") == 1


def test_an_existing_script_is_adapted_by_three_lines(example: Load) -> None:
    """The diff applies, adds three lines and takes none away; what comes out accumulates and recomputes."""
    text, hunks = (ROOT / "examples" / "existing.py").read_text(), (ROOT / "examples" / "existing.diff").read_text()
    added = 0
    for hunk in re.split(r"^@@.*\n", hunks, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] == " ")
        assert text.count(before) == 1
        text = text.replace(before, "".join(line[1:] for line in lines))
        added += len(lines) - before.count("\n")
    assert added == 3

    options = {"limit_train_batches": 6, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    namespace: dict[str, Any] = {"__name__": "adapted"}
    exec(compile(text, "adapted.py", "exec"), namespace)
    trainer = namespace["main"](**options)
    assert type(trainer.strategy) is gacp.GACPStrategy
    assert trainer.global_step == 2
    assert example("existing").main(**options).global_step == 6  # as it is
