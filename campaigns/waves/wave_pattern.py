"""Do tiles end wave by wave? When each tile of a matmul ends, beside the collectives of its waves.

    python -m campaigns.wave_pattern --machine rtx4090x4 [--shape 2048,8192,8192] [--out build/waves]

FlashOverlap's Figure 3: the ends of all tiles, in the order in which they begin and by their place in the result. PASS:
ends lie in as many bunches as waves are counted, and the tiles of each wave end within 5 % of its duration
(FlashOverlap 3.2.3). With --out: a CSV and the picture. All times are simulated, where tiles of a wave take equally
long; `overweave trace` records those of a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from campaigns.verdict import Verdict, tell
from campaigns.waves.simulated import Sized, figure_of, save, write_rows
from overweave.hardware.machine import Machine, load
from overweave.ir.problem import Problem
from overweave.ir.timeline.timeline import COMPUTE
from overweave.schedules.communication import STAGED, TILES
from overweave.sim.simulate import simulate

OPERATOR, RANKS = "matmul_all_reduce", 2
WITHIN = 0.05


class End(NamedTuple):
    """When a tile ends. turn: its place in the order of tiles; place: among the blocks of the result, row by row."""

    wave: int
    turn: int
    place: int
    end_us: float


def ends_of(sized: Sized) -> list[End]:
    """Those of rank 0, by turn."""
    plan, per_wave = sized.waves(), sized.grouped().per_wave
    spans = simulate(plan, sized.machine, with_tiles=True).spans
    blocks = plan.schedule.buffer(STAGED).blocks
    assert blocks is not None, "tiles of waves store block by block"
    places = {cell: place for place, cell in enumerate(blocks.places)}
    tiles = sorted(
        (span for span in spans if span.rank == 0 and span.kind == COMPUTE),
        key=lambda span: (span.begin_us, span.track),
    )
    rows = plan.tile_order(0, TILES).rows
    ended = zip(tiles, rows, strict=True)
    return [
        End(turn // per_wave, turn, places[row.row // blocks.rows], span.end_us)
        for turn, (span, row) in enumerate(ended)
    ]


def bunches(ends: list[End], apart_us: float) -> int:
    """Into how many ends fall that lie further apart than so."""
    times = sorted(end.end_us for end in ends)
    return 1 + sum(later - earlier > apart_us for earlier, later in pairwise(times))


def widest_us(ends: list[End]) -> float:
    """How long the tiles of one wave take to end, of all waves the longest."""
    waves: dict[int, list[float]] = {}
    for end in ends:
        waves.setdefault(end.wave, []).append(end.end_us)
    return max(max(one) - min(one) for one in waves.values())


def verdicts(sized: Sized, ends: list[End]) -> Iterator[Verdict]:
    costs = sized.costs()
    found, spread = bunches(ends, WITHIN * costs.wave_us), widest_us(ends) / costs.wave_us
    yield Verdict(f"{sized}: waves", f"{found}, counted {costs.waves}", found == costs.waves)
    yield Verdict("tiles of a wave end within", f"{spread:.1%} of its duration", spread <= WITHIN)


def draw(path: Path, machine: Machine, ends: list[End]) -> None:
    """When tiles end, in the order of the table, and by their place in the result."""
    figure, ((left, right),) = figure_of(2, 1, 13, 4.5)
    for panel, along, words in (
        (left, "turn", "turn of the tile"),
        (right, "place", "block of the result, row by row"),
    ):
        for wave in range(1 + ends[-1].wave):
            own = [end for end in ends if end.wave == wave]
            panel.scatter([getattr(end, along) for end in own], [end.end_us for end in own], s=6, label=f"wave {wave}")
        panel.set(xlabel=words, ylabel="end of the tile (us)")
    left.legend()
    figure.suptitle(f"{machine.name}, simulated: after FlashOverlap's Figure 3")
    save(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="rtx4090x4")
    parser.add_argument("--shape", default="2048,8192,8192", metavar="M,N,K")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    machine, (m, n, k) = load(asked.machine), map(int, asked.shape.split(","))
    sized = Sized(machine, Problem(operator=OPERATOR, m=m, n=n, k=k, world_size=RANKS, dtype="bfloat16"))
    ends = ends_of(sized)
    if asked.out:
        name = f"wave_pattern.{machine.name}"
        write_rows(asked.out / f"{name}.csv", [end._asdict() for end in ends])
        draw(asked.out / f"{name}.png", machine, ends)
    return tell(verdicts(sized, ends))


if __name__ == "__main__":
    sys.exit(main())
