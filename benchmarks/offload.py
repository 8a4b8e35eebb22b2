"""Step time and peak memory of activation offload, ours and others', on one model in one run.

    python benchmarks/offload.py [--out offload.json] [--plot offload.png] [--seconds 330]

With a GPU: a transformer in bfloat16, hidden 1024, 2048 and 4096, sequences of 2k to 32k tokens. What is compared:

- `nothing`: no offload and no recomputation, where it fits; `all, ...`: the same with everything the blocks save
  offloaded.
- `checkpoint`: recomputation alone; `inputs, ...`: the same with the inputs of the blocks offloaded.
- *ours* is `offload_blocks` and `checkpoint_blocks(offload=True)`; *save_on_cpu* is torch's with pinned memory, around
  each checkpoint what Hugging Face's `offload=True` does; *torchtune* and *TRL* are their `OffloadActivations`, where
  `pip install --no-deps torchtune trl` and `pip install psutil accelerate transformers` were run.

`over` is what a variant takes more than the one that it is measured against, `nothing` or `checkpoint`.

Without a GPU: the same engine on the simulated device of the tests, for a small model: bytes, waits and the order of
the copies. There are no times then.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from offload_variants import AGAINST, VARIANTS, Model, TransformerLayer  # noqa: E402

GIB = 1 << 30
DEPTH = 12
SIZES = [
    *((hidden, tokens) for tokens in (8192, 2048) for hidden in (4096, 2048, 1024)),
    *((hidden, 32768) for hidden in (1024, 2048, 4096)),
]
"""Hidden and tokens, the most telling first. What takes longest comes last, where the time may be up."""


def measure(model: Model, x: Tensor, variant: str, seconds: float = 3.0) -> dict[str, Any]:
    """Median milliseconds of a step and the peak of allocated memory, in GiB; or why there are none.

    Args:
        model: Changed only for the time of the measurement.
        x: Its input.
        variant: A key of `VARIANTS`.
        seconds: After two steps of warm-up, and after at least three that count, no further step is begun.
    """
    times: list[float] = []
    try:
        with VARIANTS[variant](model):
            for step in range(12):
                if step == 2:
                    times.clear()
                    torch.accelerator.reset_peak_memory_stats()
                torch.accelerator.synchronize()
                start = time.perf_counter()
                model.step(x)
                torch.accelerator.synchronize()
                times.append(time.perf_counter() - start)
                model.zero_grad(set_to_none=True)
                if step >= 4 and sum(times) > seconds:
                    break
        return {
            "milliseconds": round(1000 * statistics.median(times), 2),
            "fastest": round(1000 * min(times), 2),
            "peak_gib": round(torch.accelerator.max_memory_allocated() / GIB, 3),
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
        torch.accelerator.empty_cache()
        torch.accelerator.empty_host_cache()


def on_gpu(seconds: float, write: Callable[[list[dict[str, Any]]], None]) -> None:
    """All sizes and variants, until the time is up. ``write`` is called with all rows after each."""
    start = time.monotonic()
    device = torch.accelerator.current_accelerator()
    rows: list[dict[str, Any]] = []
    write(rows)
    for hidden, tokens in SIZES:
        with torch.device(device):
            model = Model(hidden, DEPTH).to(torch.bfloat16)
            x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16)
        figures: dict[str, dict[str, Any]] = {}
        for variant in VARIANTS:
            if time.monotonic() - start > seconds:
                return
            if too_much_for_the_host(variant, hidden, tokens):
                figures[variant] = {"failed": "would take more pinned memory than there is"}
            else:
                figures[variant] = measure(model, x, variant)
            base = figures.get(AGAINST.get(variant, ""), {}).get("milliseconds")
            if base and "milliseconds" in figures[variant]:
                figures[variant]["over"] = round(figures[variant]["milliseconds"] / base - 1, 4)
            rows.append({"hidden": hidden, "tokens": tokens, "depth": DEPTH, "variant": variant, **figures[variant]})
            print(json.dumps(rows[-1]), flush=True)
            write(rows)
        del model, x


def too_much_for_the_host(variant: str, hidden: int, tokens: int) -> bool:
    """Whether torch's hooks would pin more than there is, rounded up to powers of two; ours have a cap."""
    from lightning_gacp.offload.host import available_bytes

    return variant == "all, save_on_cpu" and 2 * 34 * tokens * hidden * DEPTH > available_bytes()


def on_simulated_device(write: Callable[[list[dict[str, Any]]], None]) -> None:
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
        write(rows)


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
    parser.add_argument("--seconds", type=float, default=330.0, help="time after which no further variant is begun")
    arguments = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    name = "simulated" if accelerator is None else accelerator.type
    if name == "cuda":
        name = torch.cuda.get_device_name()

    def write(rows: list[dict[str, Any]]) -> None:
        figures = {"device": name, "torch": torch.__version__, "rows": rows}
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")

    if accelerator is None:
        on_simulated_device(write)
        return
    try:
        on_gpu(arguments.seconds, write)
    finally:  # what was measured before somebody's code has broken the device is worth a plot too
        try:
            plot(json.loads(arguments.out.read_text())["rows"], arguments.plot)
        except ImportError:
            print("matplotlib is not installed, so there is no plot")


if __name__ == "__main__":
    main()
