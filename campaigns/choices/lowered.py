"""What other compilers decided, executed step by step as they wrote it, and as ours: simulated.

    python -m campaigns.lowered              all rows of AutoOverlap's Figure 10, then synthesis
    python -m campaigns.lowered --only synth

theirs: every collective whole, by the library, then the matmul or the attention (Alpa); slice by slice (Domino); a
whole shard passed on, then computed with (Mercury). ours: the same placements, or the same nest, by an operator whose
tiles wait for pieces, or with shards in halves; of each the best of a few pieces. Synthesis: on machines whose GPUs are
joined in ways that templates do or do not know, the best template written by hand, the search, and what no schedule can
beat: the slowest cut of the links.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from campaigns.choices.joined_machines import mesh, ring, scattered_pairs
from overweave.hardware.machine import Machine, load
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import Apply
from overweave.lower import (
    AttentionOp,
    MatmulOp,
    Nest,
    RankMesh,
    buffer,
    loop,
    loops,
    parallelize,
    placements,
    shard,
    shift,
)
from overweave.lower.nest import NestWord
from overweave.lower.writer import PATHS
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.by_moves import by_moves
from overweave.schedules.methods.registry import METHODS
from overweave.schedules.records.record import Method
from overweave.schedules.synthesis.links import gather_bound_us
from overweave.schedules.synthesis.templates import gather_on
from overweave.sim.simulate import total_us

SIZE, SEQUENCE = MatmulOp(16384, 8192, 8192), AttentionOp(1, 32, 32768, 128)
ATTENTION_TFLOPS = 600.0  # of a forward kernel, every SM busy
BY_HAND: dict[str, tuple[dict[str, str | int], ...]] = {
    "push": ({"order": "ring"}, {"order": "all_peers"}),
    "ring": ({"lanes": 1}, {"lanes": 2}),
    "double_ring": ({},),
    "islands": ({"island": 2}, {"island": 4}),
}
PIECES = (1, 2, 4, 6)
Asked = dict[str, Any]  # of placements


class Row(Struct, frozen=True):
    """Two times of the same work, in microseconds."""

    name: str
    ranks: int
    theirs_us: float
    ours_us: float

    def __str__(self) -> str:
        ratio = self.theirs_us / self.ours_us
        return f"{self.name:34s} {self.ranks:2d}  {self.theirs_us:9.1f}  {self.ours_us:9.1f}  {ratio:5.2f}"


def attention_us(step: Apply) -> float:
    """The time of a piece of attention, of a causal or a whole rectangle alike: both its products; merges, by bytes."""
    if step.function == "merge":
        return 1.0
    rows: Counter[str] = Counter()
    for need in step.needs:
        rows[need.tensor] += need.region.shape[0]
    width = next(need.region.shape[1] for need in step.needs if need.tensor == "q")
    return 4 * rows["q"] * rows["k"] * width / ATTENTION_TFLOPS / 1e6


def us(plan: Plan, ranks: int) -> float:
    """The time on so many H200s."""
    attends = any(isinstance(step, Apply) for step in plan.schedule.operations)
    return total_us(plan, load("h200x8" if ranks > 4 else "h200x4"), attention_us if attends else None)


def best_us(operator: str, problem: Problem, ranks: int, methods: tuple[str, ...]) -> float:
    """The quickest of some methods of an operator, each in a few pieces."""
    options: list[tuple[str, dict[str, str | int]]] = [
        (name, {"kernel": "hopper", "pieces": pieces}) for name in methods for pieces in PIECES[:3]
    ]
    return min(us(build(f"{operator}.{name}", problem, each), ranks) for name, each in options)


def matmul_rows(ranks: int) -> Iterator[Row]:
    """Domino's slices of a row-parallel matmul, Alpa's gather and scatter, Mercury's ring."""
    summed: Asked = {"inputs": {"x": "S1", "w": "S0"}, "outputs": "R", "mesh": ranks}
    slices = (placements(replace(SIZE, slices=cut), **summed, path="direct").plan for cut in ((1, 2), (2, 1), (2, 2)))
    fused = placements(SIZE, **summed).fused
    assert fused is not None
    ours_us = best_us("matmul_all_reduce", fused.problem, ranks, ("two_shot", "ring_stored"))
    yield Row("Domino, matmul", ranks, min(us(plan, ranks) for plan in slices), ours_us)
    for name, placed, operator, methods in (
        ("Alpa, gather + matmul", ("S0", "S1", "S1"), "all_gather_matmul", ("push",)),
        ("Alpa, matmul + scatter", ("S1", "S0", "S0"), "matmul_reduce_scatter", ("scatter", "fused_ring")),
    ):
        asked: Asked = {"inputs": {"x": placed[0], "w": placed[1]}, "outputs": placed[2], "mesh": ranks}
        theirs, ours = placements(SIZE, **asked, path="direct").plan, placements(SIZE, **asked).fused
        assert ours is not None
        yield Row(name, ranks, us(theirs, ranks), best_us(operator, ours.problem, ranks, methods))
    words: tuple[NestWord, ...] = (parallelize("n", 0), shard("x", m=0), shard("w", n=0), shard("y", n=0))
    walked = loops(Nest(SIZE, (*words, loop("m", ranks), shift("m", 0), buffer("x"))), mesh=ranks)
    assert walked.fused is not None
    ours_us = best_us("all_gather_matmul", walked.fused.problem, ranks, ("push", "ring"))
    yield Row("Mercury, ring matmul", ranks, us(walked.plan, ranks), ours_us)


def attention_rows(ranks: int) -> Iterator[Row]:
    """Alpa's gathered keys, and its exchange of heads; Mercury's rings."""
    rows: dict[str, str] = {"q": "S2", "k": "S2", "v": "S2"}
    own = (parallelize("q", 0), shard("q", q=0), shard("k", kv=0), shard("v", kv=0), shard("o", q=0))
    kept = (buffer("k"), buffer("v"))
    pulled: tuple[NestWord, ...] = (*own, loop("kv", ranks), shift("kv", 0))
    gathered = loops(Nest(SEQUENCE, (*own, *kept)), mesh=ranks, path="direct").plan
    yield Row("Alpa, attention, keys gathered", ranks, us(gathered, ranks), us(_nest(pulled, ranks), ranks))
    asked: Asked = {"inputs": rows, "outputs": "S2", "mesh": ranks}
    theirs_us, *ours_us = (us(placements(SEQUENCE, **asked, path=path).plan, ranks) for path in PATHS)
    yield Row("Alpa, attention, heads exchanged", ranks, theirs_us, min(theirs_us, *ours_us))
    heads = dict.fromkeys(rows, "S1")
    local = us(placements(SEQUENCE, inputs=heads, outputs="S1", mesh=ranks).plan, ranks)
    out = next(matmul_rows(ranks))
    yield Row("Domino, attention + projection", ranks, local + out.theirs_us, local + out.ours_us)
    whole, halves = (*pulled, *kept), (*pulled, *kept, loop("kv", 2))
    yield Row("Mercury, ring attention", ranks, us(_nest(whole, ranks), ranks), us(_nest(halves, ranks), ranks))
    shape = (ranks // 2, 2)
    cuts = {"q": "q", "k": "kv", "v": "kv", "o": "q"}
    homes = (shard(name, **{axis: (0, 1)}) for name, axis in cuts.items())
    both: tuple[NestWord, ...] = (parallelize("q", 0), parallelize("q", 1), *homes)
    double = (*both, loop("kv", shape[0]), shift("kv", 0), loop("kv", 2), shift("kv", 1), *kept)
    theirs, ours = (
        loops(Nest(SEQUENCE, each), mesh=RankMesh(shape)).plan for each in (double, (*double, loop("kv", 2)))
    )
    yield Row("Mercury, double-ring attention", ranks, us(theirs, ranks), us(ours, ranks))


def _nest(words: tuple[NestWord, ...], ranks: int) -> Plan:
    return loops(Nest(SEQUENCE, words), mesh=ranks).plan


class Synthesis(Struct, frozen=True):
    """Times of one all-gather before a matmul that is quick beside it: written by hand, searched, and the bound."""

    name: str
    by_hand: str
    by_hand_us: float
    searched_us: float
    bound_us: float

    def __str__(self) -> str:
        times = f"{self.by_hand_us:9.1f}  {self.searched_us:9.1f}  {self.bound_us:9.1f}"
        return f"{self.name:18s} {self.by_hand:24s} {times}  {self.by_hand_us / self.searched_us:5.2f}"


def machines() -> dict[str, Machine]:
    """By how GPUs are joined."""
    return {
        "full mesh": mesh(),
        "ring": ring(),
        "PCIe tree": load("h100_pciex8"),
        "two levels": load("h100_nvlx8"),
        "mesh less a link": mesh(without=(0, 5)),
        "two levels, mixed": scattered_pairs(),
    }


def synthesis(name: str, machine: Machine, pieces: tuple[int, ...] = PIECES) -> Synthesis:
    """One machine."""
    ranks, m, k = machine.gpus, 32768, 8192
    problem = Problem(operator="all_gather_matmul", m=m, n=64, k=k, world_size=ranks, dtype="bfloat16")
    hand = {
        f"{method} pieces={cut}": _us(method, problem, options | {"pieces": cut}, machine)
        for method, tried in BY_HAND.items()
        for options in tried
        for cut in pieces
    }
    found = replace(METHODS["all_gather_matmul.synth"], write=by_moves(gather_on(machine)))
    searched = min(total_us(_built(found, problem, cut), machine) for cut in pieces)
    best = min(hand, key=hand.__getitem__)
    return Synthesis(name, best, hand[best], searched, gather_bound_us(machine, ranks, m // ranks * k * 2))


def _us(method: str, problem: Problem, options: dict[str, str | int], machine: Machine) -> float:
    return total_us(build(f"all_gather_matmul.{method}", problem, options), machine)


def _built(method: Method, problem: Problem, pieces: int) -> Plan:
    """The plan of a method that no machine of the package has."""
    kept = METHODS[method.full_name]
    METHODS[method.full_name] = method
    try:
        return build(method.full_name, problem, {"pieces": pieces})
    finally:
        METHODS[method.full_name] = kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("figure", "synth"), help="one of both tables")
    only = parser.parse_args().only
    if only != "synth":
        print(f"{'':34s} {'W':>2s}  {'theirs us':>9s}  {'ours us':>9s}  ratio")
        for ranks in (4, 8):
            for row in (*matmul_rows(ranks), *attention_rows(ranks)):
                print(row, flush=True)
    if only != "figure":
        print(f"\n{'8 GPUs':18s} {'by hand':24s} {'us':>9s}  {'search us':>9s}  {'bound us':>9s}  ratio")
        for name, machine in machines().items():
            print(synthesis(name, machine), flush=True)


if __name__ == "__main__":
    main()
