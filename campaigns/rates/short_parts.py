"""The parts of a short launch of the Hopper matmul, from the device clock, as a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from overweave.memory.device.signals import BEGUN, CLAIMED, MULTIPLIED, PARTED, READY, STORED

COLOURS = ("#6b7280", "#0891b2", "#d97706", "#dc2626", "#2563eb", "#059669", "#9333ea")
INK, DIM = "#1b1f24", "#6b7280"


class Parts(NamedTuple):
    """Of the tile that is stored last, in us: each part ends where the next begins.

    launch: from the kernel before to the program's first instruction. parted: barriers are made, and partitions start.
    claim: the first claim, under way from the beginning, is there and handed over. table: the tile's row is read.
    product: its operands are loaded and multiplied, and its result is in shared memory. store: bulk stores have read it
    there. end: it is in memory, and the kernel behind begins.
    """

    launch: float
    parted: float
    claim: float
    table: float
    product: float
    store: float
    end: float

    @property
    def total(self) -> float:
        return sum(self)


def parts_of(trace: torch.Tensor, before_ns: int, behind_ns: int) -> Parts:
    """trace: int64 `[tiles, TRACE_COLUMNS]` of one launch, between two kernels that took the time.

    A program that claims a second tile writes its beginning beside the first one alone: the second is left out.
    """
    columns = [one.value for one in (BEGUN, PARTED, CLAIMED, READY, MULTIPLIED, STORED)]
    first = trace[trace[:, BEGUN.value] >= before_ns]
    last = first[int(first[:, STORED.value].argmax())].tolist()
    clocks = [before_ns, *(last[column] for column in columns), behind_ns]
    return Parts(*((later - sooner) / 1e3 for sooner, later in zip(clocks, clocks[1:], strict=False)))


def mean_of(samples: Sequence[Parts]) -> Parts:
    """Part by part. The clock ticks in steps of 32 ns, which a mean of many evens out."""
    return Parts(*(fmean(each) for each in zip(*samples, strict=True)))


def table(found: Mapping[str, Parts], beside: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each launch: its parts, the whole, and the wholes of what was launched in its place."""
    words = [*Parts._fields, "total"]
    lines = [f"{'us by the device clock':28s}" + "".join(f"{word:>9s}" for word in words)]
    for name, parts in found.items():
        others = ", ".join(f"{other} {us:.2f}" for other, us in beside.get(name, {}).items())
        lines.append(f"{name:28s}" + "".join(f"{us:9.2f}" for us in (*parts, parts.total)) + f"   {others}")
    return lines


def save_picture(path: Path, found: Mapping[str, Parts], beside: Mapping[str, Mapping[str, float]]) -> None:
    """A bar for each launch, its parts behind each other; below it those of what was launched in its place."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars: list[tuple[str, Parts | float]] = []
    for name, parts in found.items():
        bars += [(name, parts), *((other, us) for other, us in beside.get(name, {}).items())]
    figure = Figure(figsize=(9, 0.9 + 0.3 * len(bars)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for place, (_, what) in enumerate(bars):
        if not isinstance(what, Parts):
            axis.barh(place, what, color="#c9ced6", height=0.7)
            continue
        begin = 0.0
        for field, us, colour in zip(Parts._fields, what, COLOURS, strict=True):
            axis.barh(place, us, left=begin, color=colour, height=0.7, label=field if place == 0 else None)
            begin += us
    axis.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=7.5, color=INK)
    axis.invert_yaxis()
    axis.set_xlabel("us by the device clock, from the kernel before to the kernel behind", fontsize=8, color=DIM)
    axis.tick_params(axis="both", length=0, labelsize=7.5)
    axis.spines[:].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(COLOURS), fontsize=7.5, frameon=False, labelcolor=INK)
    figure.savefig(path, format="png", facecolor="white")
