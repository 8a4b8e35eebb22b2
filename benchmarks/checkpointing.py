"""Memory against step time of activation checkpointing: ours, Hugging Face's and PyTorch's, on one Llama in one run.

python benchmarks/checkpointing.py                     a small model, a minute on CPU; the larger one on CUDA
python benchmarks/checkpointing.py --output docs/checkpointing

Prints a table and, with ``--output NAME``, writes NAME.json and NAME.png. Every measurement is a process of its own,
and the variants take turns, so that what else the machine does hits all of them. The peak is the allocator's on CUDA,
and on CPU what the process grew by. Waiting is what is alive between forward and backward, whoever holds it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_gacp.checkpointing import checkpoint_blocks

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from checkpointing.models import LiveBytes

MIB = 1 << 20


def huggingface(model: LlamaForCausalLM) -> None:
    """Hugging Face's own checkpointing, non-reentrant as is its default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the name of this method differs between releases
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def pytorch(model: nn.Module) -> None:
    """PyTorch's wrapper around each layer."""
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, LlamaDecoderLayer)
    )


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: None,
    "ours, n = 1": checkpoint_blocks,
    "ours, n = 2": lambda model: checkpoint_blocks(model, every_n_layers=2),
    "ours, n = 4": lambda model: checkpoint_blocks(model, every_n_layers=4),
    "ours, save_matmuls": lambda model: checkpoint_blocks(model, policy="save_matmuls"),
    "Hugging Face": huggingface,
    "PyTorch": pytorch,
}


def measure(name: str, sizes: argparse.Namespace) -> dict[str, float]:
    """Train for some steps in this process. Times are seconds, sizes bytes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=sizes.width,
        intermediate_size=3 * sizes.width,
        num_hidden_layers=sizes.depth,
        num_attention_heads=sizes.width // 64,
        max_position_embeddings=sizes.length,
        use_cache=False,
    )
    before = resident_bytes()
    model = LlamaForCausalLM(config).to(device)
    VARIANTS[name](model)
    tokens = torch.randint(0, 1024, (sizes.batch, sizes.length), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    times = [step() for _ in range(sizes.steps)]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    if device.type == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    optimizer.zero_grad()
    with LiveBytes() as live:
        loss = model(input_ids=tokens, labels=tokens).loss
        waiting = live.now
    del loss
    return {"seconds": min(times), "waiting_bytes": waiting, "peak_bytes": peak}


def resident_bytes() -> int:
    """Memory of this process, which as a fork starts with its parent's."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def in_child(name: str, sizes: argparse.Namespace) -> dict[str, float]:
    """Measure in a process of its own, whose peak is then its own too."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure, (name, sizes))


def run(sizes: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure all variants in turn, several times."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(sizes.rounds):
        for name, found in runs.items():
            found.append(in_child(name, sizes))
    results = {}
    for name, found in runs.items():
        seconds = [each["seconds"] for each in found]
        results[name] = {
            "seconds": min(seconds),
            "seconds_median": statistics.median(seconds),
            "seconds_max": max(seconds),
            "waiting_mib": found[0]["waiting_bytes"] / MIB,
            "peak_mib": statistics.median(each["peak_bytes"] for each in found) / MIB,
        }
    return results


def table(results: dict[str, dict[str, float]]) -> str:
    """The results as Markdown."""
    plain = results["plain"]
    lines = [
        "| | waiting MiB | peak MiB | s / step (best) | median | slowest | against plain |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, row in results.items():
        lines.append(
            f"| {name} | {row['waiting_mib']:.1f} | {row['peak_mib']:.0f} | {row['seconds']:.3f} | "
            f"{row['seconds_median']:.3f} | {row['seconds_max']:.3f} | {row['seconds'] / plain['seconds']:.2f} |"
        )
    return "\n".join(lines)


def plot(results: dict[str, dict[str, float]], path: Path) -> None:
    """Draw memory against time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 4))
    for name, row in results.items():
        marker = "o" if name.startswith("ours") else "s"
        axes.plot(row["seconds"], row["peak_mib"], marker, alpha=0.8)
        # Ours are named on the left of their point and the others on the right, as some lie close together.
        left = name.startswith("ours")
        axes.annotate(
            name,
            (row["seconds"], row["peak_mib"]),
            xytext=(-7 if left else 7, 0),
            textcoords="offset points",
            horizontalalignment="right" if left else "left",
            verticalalignment="center",
            fontsize=9,
        )
    axes.set_xlabel("seconds per step (best)")
    axes.set_ylabel("peak memory (MiB)")
    axes.margins(0.22, 0.1)  # room for the names
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Measure, print and write."""
    cuda = Path("/dev/nvidia0").exists()  # without waking CUDA up in this process, which forks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="write OUTPUT.json and OUTPUT.png")
    parser.add_argument("--width", type=int, default=2048 if cuda else 256)
    parser.add_argument("--depth", type=int, default=16 if cuda else 8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048 if cuda else 256)
    parser.add_argument("--steps", type=int, default=8 if cuda else 3)
    parser.add_argument("--rounds", type=int, default=3)
    sizes = parser.parse_args(arguments)
    results = run(sizes)
    print(table(results))
    if sizes.output:
        setting = {name: value for name, value in vars(sizes).items() if name != "output"}
        setting.update(torch=torch.__version__, device="cuda" if cuda else "cpu", python=sys.version.split()[0])
        Path(f"{sizes.output}.json").write_text(json.dumps({"setting": setting, "results": results}, indent=1) + "\n")
        plot(results, Path(f"{sizes.output}.png"))
    return results


if __name__ == "__main__":
    main()
