"""Draw recorded memory over one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from lightning_gacp.callbacks.memory_recorder import PHASES, Sample

_COLOURS = dict(zip(PHASES, ("#9ecae1", "#fdae6b", "#e34a33", "#a1d99b"), strict=True))
_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10))


def draw(
    samples: Sequence[Sample], path: Path, title: str, measured: str, before: Sequence[Sample] | None = None
) -> None:
    """Write a PNG of memory over time, with the phases as coloured areas.

    Args:
        samples: The recording.
        path: The file to write.
        title: Above the picture.
        measured: What the bytes are, for the axis.
        before: Another recording to compare with, drawn as a grey line.
    """
    from matplotlib.figure import Figure  # an extra; and without pyplot, so that no global state is touched
    from matplotlib.patches import Patch

    peak = max(samples, key=lambda sample: sample.bytes)
    highest = max(peak.bytes, *(sample.bytes for sample in before or [peak]))
    unit, power = next(((unit, power) for unit, power in _UNITS if highest >= 1 << power), ("B", 0))
    scale = float(1 << power)

    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.add_subplot()
    for phase, run in groupby(range(len(samples)), key=lambda place: samples[place].phase):
        places = list(run)
        places.insert(0, max(places[0] - 1, 0))  # from the end of the last operation before the phase
        times = [samples[place].ms for place in places]
        sizes = [samples[place].bytes / scale for place in places]
        # Without smooth edges, which would leave a light seam between two areas.
        axes.fill_between(times, sizes, step="pre", color=_COLOURS[phase], linewidth=0, antialiased=False)
    axes.step([s.ms for s in samples], [s.bytes / scale for s in samples], where="pre", color="#333333", linewidth=0.8)
    handles: list[Any] = [
        Patch(color=_COLOURS[phase], label=phase) for phase in PHASES if any(s.phase == phase for s in samples)
    ]
    if before:
        (line,) = axes.step(
            times_of(before, samples),
            [s.bytes / scale for s in before],
            where="pre",
            color="#7f7f7f",
            linewidth=0.8,
            linestyle="--",
            label=f"before: peak {max(s.bytes for s in before) / scale:.1f} {unit}",
        )
        handles.append(line)

    starts = borders(samples)[:-1]
    for start in starts[1:]:
        axes.axvline(start, color="#333333", linewidth=0.6, linestyle=":")
    axes.axhline(peak.bytes / scale, color="#333333", linewidth=0.6)
    axes.set_ylim(0, highest / scale * 1.12)
    axes.set_xlim(0, samples[-1].ms)
    axes.set_xlabel("time in the step, slowed by the recording [ms]; dotted: the next micro-batch")
    axes.set_ylabel(f"{measured} [{unit}]")
    where = f"{peak.phase} of micro-batch {peak.micro_batch + 1} of {len(starts)}"
    axes.set_title(f"{title}\npeak {peak.bytes / scale:.1f} {unit} in the {where}", loc="left", fontsize="medium")
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=120)


def borders(samples: Sequence[Sample]) -> list[float]:
    """Return when each micro-batch began, and when the last ended, in milliseconds."""
    changes = [last.ms for last, sample in pairwise(samples) if last.micro_batch != sample.micro_batch]
    return [samples[0].ms, *changes, samples[-1].ms]


def times_of(before: Sequence[Sample], samples: Sequence[Sample]) -> list[float]:
    """Return the times of another recording on the axis of this one.

    Each micro-batch is stretched to the length of its counterpart, whatever it took; where there are not as many, the
    whole step is.
    """
    theirs, ours = borders(before), borders(samples)
    if len(theirs) != len(ours):
        theirs, ours = [theirs[0], theirs[-1]], [ours[0], ours[-1]]
    times, place = [], 0
    for sample in before:
        while place + 2 < len(theirs) and sample.ms >= theirs[place + 1]:
            place += 1
        share = (sample.ms - theirs[place]) / ((theirs[place + 1] - theirs[place]) or 1.0)
        times.append(ours[place] + share * (ours[place + 1] - ours[place]))
    return times
