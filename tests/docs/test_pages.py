"""What the README and the pages in ``docs/`` tell a reader to run, runs; what they link to is there.

Blocks of a page run in order, each language in its own way:

* ``python``: in one namespace a page, which starts with ``module`` and ``datamodule`` of a tiny language model;
* ``yaml``: given to the example's command line after ``base.yaml``, cut to a few micro-batches;
* ``bash``: each line must be a target of the Makefile, or a known command, which is then run in the same cut form.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightning_gacp as gacp

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

# Lines of bash that are not tried here, each because something else does it.
TRIED_ELSEWHERE = (
    "pip install",  # what `make` does first
    "git clone",
    "cd ",
    "python benchmarks/",  # the figures are tests of their own
)

Load = Callable[[str], Any]

# What the pages show on purpose: settings without effect on a CPU say so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*accelerator.*"),
    pytest.mark.filterwarnings("ignore:.*has no effect.*"),
]


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def cases(language: str) -> list[Any]:
    return [
        pytest.param(page, body, id=f"{page.stem}-{place}")
        for page in PAGES
        for place, body in enumerate(blocks(page, language))
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python(page: Path, example: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every snippet runs as it stands, in the order of the page."""
    script = example("train_lm")
    namespace: dict[str, Any] = {
        "module": script.LanguageModel(width=16, depth=4, heads=2, context=64),
        "datamodule": script.Paragraphs(context=64, limit=40),
    }
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for place, body in enumerate(blocks(page, "python")):
        exec(compile(body, f"{page.name}, python block {place}", "exec"), namespace)


@pytest.mark.parametrize(("page", "body"), cases("yaml"))
def test_yaml(page: Path, body: str, example: Load, tiny: list[str], tmp_path: Path) -> None:
    """Every YAML snippet is a config that trains."""
    (tmp_path / "snippet.yaml").write_text(body)
    base = str(ROOT / "examples" / "configs" / "base.yaml")
    cli = example("train_lm").main(["fit", "-c", base, "-c", str(tmp_path / "snippet.yaml"), *tiny])
    assert cli.trainer.global_step > 0


@pytest.mark.parametrize(("page", "body"), cases("bash"))
def test_bash(page: Path, body: str, example: Load, tiny: list[str]) -> None:
    """Every command line is one that exists."""
    for line in body.replace("\\\n", " ").splitlines():
        command = line.split("  #")[0].strip()
        if not command or command.startswith(TRIED_ELSEWHERE):
            continue
        program, *arguments = shlex.split(command)
        if program == "make":
            assert set(arguments) <= TARGETS, command
        else:
            assert (program, arguments[0]) == ("python", "examples/train_lm.py"), f"not a known command: {command}"
            rest = [str(ROOT / part) if part.endswith(".yaml") else part for part in arguments[1:]]
            if any(part.endswith(".help") for part in rest):  # as the command line's own tests do, word for word
                with pytest.raises(SystemExit, match="0"):
                    example("train_lm").main(rest)
            else:
                example("train_lm").main([*rest, *tiny])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_snippet_is_overlooked(page: Path) -> None:
    """Every fence is seen above, whatever its indentation, and is of a kind that is run, compared or only text."""
    text = page.read_text()
    kinds = [kind for kind, _ in FENCE.findall(text)]
    assert text.count("```") == 2 * len(kinds)
    assert set(kinds) <= {"python", "yaml", "bash", "diff", "text"}


def test_every_command_in_the_prose_is_there() -> None:
    """Scripts that pages name are files of the repository."""
    for page in PAGES:
        for script in re.findall(r"(?:benchmarks|examples)/[\w/]+\.(?:py|yaml|diff)", page.read_text()):
            assert (ROOT / script).exists(), f"{page.name} names {script}"


def test_links() -> None:
    """Every relative link leads to a file of the repository, and every page of docs/ is linked from somewhere."""
    linked = set()
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
                linked.add((page.parent / target).resolve())
    assert set(PAGES[1:]) <= linked


def test_quoted_bytes_are_what_the_script_prints(benchmark_script: Load, capsys: pytest.CaptureFixture[str]) -> None:
    """The table of saved bytes in the README is the output of the command that it names."""
    benchmark_script("saved_bytes").main()
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.strip().splitlines())
    assert printed in (ROOT / "README.md").read_text()


def test_quoted_diff_is_that_of_the_example() -> None:
    (quoted,) = blocks(ROOT / "docs" / "coming-from.md", "diff")
    assert quoted == (ROOT / "examples" / "existing.diff").read_text()


def test_quoted_times_are_those_behind_the_picture() -> None:
    """The table of memory against time is what the script prints for the numbers that the picture is drawn from."""
    results = json.loads((ROOT / "docs" / "checkpointing.json").read_text())["results"]
    plain = results["plain"]["seconds"]
    page = (ROOT / "docs" / "out-of-memory.md").read_text()
    for name, row in results.items():
        times = [f"{row[key]:.3f}" for key in ("seconds", "seconds_median", "seconds_max")]
        cells = [name, f"{row['waiting_mib']:.1f}", f"{row['peak_mib']:.0f}", *times, f"{row['seconds'] / plain:.2f}"]
        assert f"| {' | '.join(cells)} |" in page


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
def test_quoted_advice_is_what_the_script_prints(benchmark_script: Load) -> None:
    """The advice on the page about memory is the output of its command; sizes depend on the Python's topics."""

    def without_sizes(text: str) -> str:
        return re.sub(r"\d+\.\d+ [MK]iB", "a size", text)

    note = without_sizes(benchmark_script("oom_note").main())
    assert note in without_sizes((ROOT / "docs" / "out-of-memory.md").read_text())


SECTIONS = {
    "AccumulationMixin": gacp.AccumulationMixin,
    "GACPModelParallelStrategy": gacp.GACPModelParallelStrategy,
    "ActivationCheckpointing": gacp.ActivationCheckpointing,
    "ActivationOffload": gacp.ActivationOffload,
    "GACPMonitor": gacp.GACPMonitor,
    "MemoryTimeline": gacp.MemoryTimeline,
    "AccumulationCycle": gacp.AccumulationCycle,
}


@pytest.mark.parametrize(("title", "thing"), SECTIONS.items(), ids=SECTIONS)
def test_every_argument_is_on_the_page_of_settings(title: str, thing: Any) -> None:
    """One row for each argument, with its default, and none for an argument that is not there."""
    text = (ROOT / "docs" / "settings.md").read_text()
    section = re.split(r"^##+ ", text.split(f"# {title}\n")[1], flags=re.MULTILINE)[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE))
    parameters = {
        name: parameter.default
        for name, parameter in inspect.signature(thing.__init__).parameters.items()
        if name not in ("self", "kwargs")
    }
    assert rows.keys() == parameters.keys()
    for name, default in parameters.items():
        if not callable(default):
            assert rows[name].startswith(f"`{default}`".replace("'", "")) or f'`"{default}"`' in rows[name], name


def test_every_public_name_is_on_the_page_of_settings() -> None:
    text = (ROOT / "docs" / "settings.md").read_text()
    assert [name for name in gacp.__all__ if f"`{name}" not in text and f"# {name}\n" not in text] == ["__version__"]


def test_every_function_takes_what_its_callback_takes() -> None:
    """So one table describes both."""
    for function, callback in (
        (gacp.checkpoint_blocks, gacp.ActivationCheckpointing),
        (gacp.offload_blocks, gacp.ActivationOffload),
    ):
        ours = set(inspect.signature(function).parameters) - {"module", "device"}
        assert ours == set(inspect.signature(callback).parameters) - {"scale_batchnorm_momentum"}


def test_there_is_something_to_run() -> None:
    """A change of the fences must not turn the tests above into nothing."""
    readme = ROOT / "README.md"
    assert all(blocks(readme, language) for language in ("python", "yaml", "bash"))
