"""The ways to name the strategy on Lightning's command line: those that work, and what the others answer."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_gacp as gacp

ROOT = Path(__file__).parents[2]
STRATEGY = "lightning_gacp.GACPStrategy"


class Model(BoringModel):
    """A model with a name of its own for the command line."""


def parse(*arguments: str) -> LightningCLI:
    """Build the Trainer from a command line, without running it."""
    quiet = ["--seed_everything=1", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    return LightningCLI(Model, run=False, args=[*quiet, *arguments])


@pytest.fixture(autouse=True)
def _own_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["example"])


RUN = [
    *("--trainer.max_epochs=1", "--trainer.limit_train_batches=5", "--trainer.limit_val_batches=0"),
    *("--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false"),
]
WORKING = {
    "the registered name": ["--trainer.strategy=gacp", "--trainer.accumulate_grad_batches=3"],
    "the class alone": [f"--trainer.strategy={STRATEGY}", "--trainer.accumulate_grad_batches=3"],
    "class and one option": [f"--trainer.strategy={STRATEGY}", "--trainer.strategy.accumulate_grad_batches=3"],
    "class_path and init_args": [
        f"--trainer.strategy.class_path={STRATEGY}",
        "--trainer.strategy.init_args.accumulate_grad_batches=3",
    ],
    "JSON": [f'--trainer.strategy={{"class_path": "{STRATEGY}", "init_args": {{"accumulate_grad_batches": 3}}}}'],
}


@pytest.mark.parametrize("arguments", WORKING.values(), ids=WORKING.keys())
def test_forms_that_work(arguments: list[str]) -> None:
    """Each gives our strategy with cycles of 3: five micro-batches are two optimizer steps."""
    cli = parse(*arguments, *RUN)
    assert isinstance(cli.trainer.strategy, gacp.GACPStrategy)
    cli.trainer.fit(cli.model)
    assert cli.trainer.global_step == 2


def config(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "config.yaml").write_text(text)
    return ["--config", str(tmp_path / "config.yaml")]


def test_yaml_with_overrides(tmp_path: Path) -> None:
    """An option on the command line overrides one argument of the class that the YAML names."""
    text = f"trainer:\n  strategy:\n    class_path: {STRATEGY}\n    init_args: {{accumulate_grad_batches: 2}}\n"
    cli = parse(*config(tmp_path, text), "--trainer.strategy.init_args.num_items=samples")
    assert vars(cli.config.trainer.strategy.init_args)["accumulate_grad_batches"] == 2
    assert vars(cli.config.trainer.strategy.init_args)["num_items"] == "samples"


def test_yaml_with_an_own_counter(tmp_path: Path) -> None:
    """`num_items` takes a counter of the package, with its arguments, by class_path."""
    text = (
        f"trainer:\n  strategy:\n    class_path: {STRATEGY}\n    init_args:\n      num_items:\n"
        "        class_path: lightning_gacp.Targets\n        init_args: {key: 1, ignore_index: 255}\n"
    )
    assert isinstance(parse(*config(tmp_path, text)).trainer.strategy, gacp.GACPStrategy)


def test_printed_config_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `--print_config` writes gives the same strategy and the same callback."""
    arguments = [
        f"--trainer.strategy={STRATEGY}",
        "--trainer.strategy.accumulate_grad_batches=3",
        "--trainer.callbacks+=lightning_gacp.ActivationCheckpointing",
        "--trainer.callbacks.every_n_layers=2",
    ]
    with pytest.raises(SystemExit):
        parse(*arguments, "--print_config")
    cli = parse(*config(tmp_path, capsys.readouterr().out))
    assert vars(cli.config.trainer.strategy.init_args)["accumulate_grad_batches"] == 3
    assert any(isinstance(callback, gacp.ActivationCheckpointing) for callback in cli.trainer.callbacks)


def test_a_misspelt_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"--trainer.strategy={STRATEGY}", "--trainer.strategy.acumulate=3")
    assert "acumulate" in capsys.readouterr().err


CLASSES = [
    "GACPStrategy",
    "GACPDDPStrategy",
    "GACPModelParallelStrategy",
    "GACPFSDPStrategy",
    "ActivationCheckpointing",
    "ActivationOffload",
    "GACPMonitor",
    "MemoryTimeline",
]


@pytest.mark.parametrize("name", CLASSES)
def test_help_explains_every_argument(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` of a class shows a text for each of its own arguments."""
    option = "strategy" if name.endswith("Strategy") else "callbacks"
    with pytest.raises(SystemExit):
        parse(f"--trainer.{option}.help=lightning_gacp.{name}")
    text = capsys.readouterr().out
    for parameter in inspect.signature(getattr(gacp, name).__init__).parameters.values():
        if parameter.name in ("self", "kwargs"):
            continue
        assert f".{parameter.name}" in text, parameter.name
        described = text.split(f".{parameter.name} ", 1)[1].split(f"--trainer.{option}", 1)[0]
        assert len(described.split("\n")) > 1 or ":" in described or len(described.split()) > 4, parameter.name


def test_without_an_import_the_short_name_is_unknown(tmp_path: Path) -> None:
    """`strategy=gacp` needs the package imported; a callback of ours in the same YAML imports it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from lightning.pytorch.cli import LightningCLI\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "class Model(BoringModel): pass\n"
        "def parse(args):\n"
        "    sys.argv = ['script']\n"
        "    return LightningCLI(Model, run=False, args=['--trainer.accelerator=cpu', *args]).trainer\n"
        "for args in (['--trainer.strategy=gacp'], ['--trainer.strategy=lightning_gacp.GACPStrategy']):\n"
        "    try:\n"
        "        parse(args)\n"
        "    except ValueError as error:\n"
        "        assert 'invalid strategy name' in str(error), error\n"
        "    else:\n"
        "        raise SystemExit(f'{args} worked')\n"
        "assert 'lightning_gacp' not in sys.modules\n"
        "trainer = parse(['--config=config.yaml'])\n"
        "assert type(trainer.strategy).__name__ == 'GACPStrategy', trainer.strategy\n"
    )
    config(
        tmp_path, "trainer:\n  strategy: gacp\n  callbacks:\n    - class_path: lightning_gacp.ActivationCheckpointing\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
