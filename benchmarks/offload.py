"""Step time and peak memory of activation offload, ours and others', on one model in one run.

    python benchmarks/offload.py [--out offload.json] [--plot offload.png] [--seconds 440]

With a GPU: a transformer in bfloat16, hidden 1024, 2048 and 4096, sequences of 2k to 32k tokens. What is compared:

- `nothing`: no offload and no recomputation, where it fits; `all, ...`: the same with everything the blocks save
offloaded.
- `checkpoint`: recomputation alone; `inputs, ...`: the same with the inputs of the blocks offloaded.
- *ours* is `offload_blocks` and `checkpoint_blocks(offload=True)`; *save_on_cpu* is torch's with pinned memory, around
each
  checkpoint what Hugging Face's `offload=True` does; *torchtune* and *TRL* are their `OffloadActivations`, if they are
  installed.

Without a GPU: the same engine on the simulated device of the tests, for a small model: bytes, waits and the order of
the copies. There are no times then.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
GIB = 1 << 30

Context = Callable[["Model"], "contextlib.AbstractContextManager[Any]"]


class TransformerLayer(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // 128)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer on ``[batch, sequence, hidden]``."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Layers in a row. ``around`` is what is put around the call of each."""

    def __init__(self, hidden: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(TransformerLayer(hidden) for _ in range(depth))
        self.around: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)

    def forward(self, x: Tensor) -> Tensor:
        """Run all layers; a scalar."""
        for layer in self.layers:
            x = self.around(layer, x)
        return x.float().square().mean()


@contextlib.contextmanager
def nothing(model: Model) -> Iterator[None]:
    """Plain."""
    yield


@contextlib.contextmanager
def recomputed(model: Model, offload: bool = False) -> Iterator[None]:
    """Ours: recomputation, with or without offload of the inputs."""
    from lightning_gacp.checkpointing import checkpoint_blocks

    with checkpoint_blocks(model, blocks=TransformerLayer, offload=offload):
        yield


@contextlib.contextmanager
def everything(model: Model, fraction: float) -> Iterator[None]:
    """Ours: what the blocks save."""
    from lightning_gacp.offload import offload_blocks

    with offload_blocks(model, TransformerLayer, fraction=fraction):
        yield


@contextlib.contextmanager
def saved_on_cpu(model: Model, recompute: bool) -> Iterator[None]:
    """torch's hooks around each layer, or around the checkpoint of each."""

    def around(layer: nn.Module, x: Tensor) -> Tensor:
        with save_on_cpu(pin_memory=True):
            return checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)

    model.around = around
    try:
        yield
    finally:
        model.around = lambda layer, x: layer(x)


@contextlib.contextmanager
def packaged(model: Model, module: str) -> Iterator[None]:
    """An `OffloadActivations` of another package, around the whole model with every layer checkpointed."""
    manager = importlib.import_module(module).OffloadActivations()
    model.around = lambda layer, x: checkpoint(layer, x, use_reentrant=False)
    try:
        with manager:
            yield
    finally:
        model.around = lambda layer, x: layer(x)


VARIANTS: dict[str, Context] = {
    "nothing": nothing,
    "all, ours, fraction 0.5": lambda model: everything(model, 0.5),
    "all, ours": lambda model: everything(model, 1.0),
    "all, save_on_cpu": lambda model: saved_on_cpu(model, recompute=False),
    "checkpoint": recomputed,
    "inputs, ours": lambda model: recomputed(model, offload=True),
    "inputs, save_on_cpu (Hugging Face)": lambda model: saved_on_cpu(model, recompute=True),
    "inputs, torchtune": lambda model: packaged(model, "torchtune.training._activation_offloading"),
    "inputs, TRL": lambda model: packaged(model, "trl.models.activation_offloading"),
}


def measure(model: Model, x: Tensor, variant: str, steps: int = 5) -> dict[str, Any]:
    """Median milliseconds of a step and the peak of allocated memory, in GiB; or why there are none."""
    times = []
    try:
        with VARIANTS[variant](model):
            for step in range(3 + steps):
                if step == 3:
                    torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
                start = time.perf_counter()
                model(x).backward()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
                model.zero_grad(set_to_none=True)
        return {
            "milliseconds": round(1000 * statistics.median(times[3:]), 2),
            "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 3),
        }
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except ImportError as error:
        return {"failed": f"not installed: {error.name}"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    finally:
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()


def on_gpu(seconds: float) -> list[dict[str, Any]]:
    """All sizes and variants, the small ones first, until the time is up."""
    start = time.monotonic()
    rows = []
    sizes = [(hidden, tokens) for tokens in (2048, 8192, 32768) for hidden in (1024, 2048, 4096)]
    for hidden, tokens in sizes:
        depth = 12
        model = Model(hidden, depth).to("cuda", torch.bfloat16)
        x = torch.randn(1, tokens, hidden, device="cuda", dtype=torch.bfloat16)
        for variant in VARIANTS:
            if time.monotonic() - start > seconds:
                return rows
            row = {"hidden": hidden, "tokens": tokens, "depth": depth, "variant": variant, **measure(model, x, variant)}
            rows.append(row)
            print(json.dumps(row), flush=True)
        del model, x
    return rows


def on_simulated_device() -> list[dict[str, Any]]:
    """Bytes, waits and the order of the copies of one step, the second, when the order of the backward is known."""
    sys.path.insert(0, str(ROOT / "tests"))
    from offload.simulated import SimulatedDevice

    from lightning_gacp.blocks import evenly_spaced, find_blocks
    from lightning_gacp.checkpointing import checkpoint_blocks
    from lightning_gacp.offload import offload_selected

    torch.set_num_threads(1)
    rows = []
    for variant, recompute, fraction in (("inputs", True, 1.0), ("all", False, 0.5), ("all", False, 1.0)):
        model, device = Model(32, 6), SimulatedDevice(0)
        x = torch.randn(2, 16, 32)
        if recompute:
            checkpoint_blocks(model, blocks=TransformerLayer)
        blocks = evenly_spaced(find_blocks(model, TransformerLayer), fraction)
        applied = offload_selected(model, blocks, min_bytes=1024, device=device)
        with device:
            model(x).backward()
            first, copies = applied.engine.stats(), len(device.copies)
            model(x).backward()
        device.finish()
        second = applied.engine.stats()
        row = {
            "variant": variant,
            "fraction": fraction,
            "bytes out": second["offloaded_bytes"] - first["offloaded_bytes"],
            "bytes in": second["reloaded_bytes"] - first["reloaded_bytes"],
            "bytes of a block's input": x.nbytes,
            "served": {k: n - first["served"].get(k, 0) for k, n in second["served"].items()},
            "waits": {k: n - first["waits"].get(k, 0) for k, n in second["waits"].items()},
            "peak_in_flight_bytes": second["peak_in_flight_bytes"],
            "host_bytes": second["host_bytes"],
            "schedule": " ".join(f"{way}:{nbytes}" for way, nbytes in device.copies[copies:]),
            "unordered accesses": len(device.races),
        }
        rows.append(row)
        print(json.dumps(row, indent=2))
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time and memory of each variant over the size of the model."""
    from matplotlib import pyplot

    sizes = sorted({(row["hidden"], row["tokens"]) for row in rows})
    figure, axes = pyplot.subplots(1, 2, figsize=(14, 5))
    for axis, key, title in zip(axes, ("milliseconds", "peak_gib"), ("step, ms", "peak, GiB"), strict=True):
        for variant in VARIANTS:
            found = {(row["hidden"], row["tokens"]): row.get(key) for row in rows if row["variant"] == variant}
            axis.plot(range(len(sizes)), [found.get(size) or float("nan") for size in sizes], "o-", label=variant)
        axis.set_xticks(range(len(sizes)), [f"{hidden}\n{tokens}" for hidden, tokens in sizes])
        axis.set_xlabel("hidden, tokens")
        axis.set_yscale("log")
        axis.set_title(title)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("offload.json"), help="figures, as JSON")
    parser.add_argument("--plot", type=Path, default=Path("offload.png"), help="figures, as a plot (GPU only)")
    parser.add_argument("--seconds", type=float, default=440.0, help="time after which no further size is begun")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    rows = on_gpu(arguments.seconds) if gpu else on_simulated_device()
    device = torch.cuda.get_device_name() if gpu else "simulated"
    arguments.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=2) + "\n")
    if gpu:
        try:
            plot(rows, arguments.plot)
        except ImportError:
            print("matplotlib is not installed, so there is no plot")


if __name__ == "__main__":
    main()
