"""Flux's Figure 15 on paper: 16 ranks on two hosts of 8, and how groups over hosts fare with more of them.

    python -m campaigns.flux_hosts [--ranks 16 64 256]

First, of the three clusters of the paper's section 5.1, its gather and its scatter: the library's collective and a
matmul in sequence (by which of NCCL's ways), plans on two levels that cross by the library, the same by puts of one
side as NVSHMEM has them (which nothing here runs), and one flat push of that kind. Beside them what the paper says of
each cluster in words: the most speed-up over the library, and the most overlap efficiency. Then, on H800s, the seconds
of the processor that a prediction of larger groups takes, by the simulation of one island.

PASS: the quickest plan is within 15 % of the paper's speed-up, or the reason stands below; on two hosts of H800s the
gather on two levels at least 5 times as quick as the flat push; predictions within 10 s each.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from campaigns.verdict import Verdict, tell
from overweave.errors import InputError
from overweave.hardware.cards import machine_of_ranks
from overweave.hardware.machine import Machine, load
from overweave.hardware.topology import MEMORY
from overweave.ir.problem import Problem
from overweave.schedules.catalog.catalog import build
from overweave.sim.alike import islands_among, ranks_to_simulate
from overweave.sim.cost import library_matmul_us
from overweave.sim.nccl import crossing_of
from overweave.sim.simulate import total_us

RANKS, OF_A_HOST = 16, 8
GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
SIZES = {GATHER: (8192, 49152 // RANKS, 12288), SCATTER: (8192, 12288, 49152 // RANKS)}  # m, n, k of a rank
LIBRARY, LEVELS, ONE_SIDED, FLAT = "sequential", "islands", "islands, one-sided", "flat, one-sided"
PIECES = (1, 2)
TOLERANCE, LEAST_GAIN, MOST_S = 0.15, 5.0, 10.0


class Cluster(Struct, frozen=True):
    """A machine, and the paper's words on it: the most speed-up, and the most overlap efficiency. reason: why the
    prediction differs by more than the tolerance, if it does."""

    machine: str
    speedup: float
    efficiency: float
    reason: str = ""


# SOURCE: Flux (arXiv 2406.06858), 5.1, on its Figure 15. The bars of the figure have no numbers.
CLUSTERS = (
    Cluster(
        *("a100_pciex8x2", 1.32, 0.18),
        reason="its rings of NCCL through two processors are estimates, and Flux is quicker there than NCCL alone",
    ),
    Cluster("a100x8x2", 1.57, 0.74),
    Cluster("h800x8x2", 1.55, 0.56),
)


class Row(Struct, frozen=True):
    """One operator on one cluster: the matmul alone, every plan, and NCCL's way."""

    cluster: Cluster
    operator: str
    matmul_us: float
    times_us: dict[str, float]
    way: str

    @property
    def best(self) -> str:
        return min((LEVELS, ONE_SIDED), key=self.times_us.__getitem__)

    def speedup(self, plan: str) -> float:
        return self.times_us[LIBRARY] / self.times_us[plan]

    def efficiency(self, plan: str) -> float:
        """Overlap efficiency (Flux, 2.3)."""
        exposed_us = self.times_us[plan] - self.matmul_us
        return 1.0 - exposed_us / (self.times_us[LIBRARY] - self.matmul_us)

    def __str__(self) -> str:
        times = ", ".join(f"{plan} {us:.0f}" for plan, us in self.times_us.items())
        gains = f"{self.best}: {self.speedup(self.best):.2f} times as fast, efficiency {self.efficiency(self.best):.0%}"
        what = f"{self.cluster.machine:14s} {self.operator:22s} matmul {self.matmul_us:.0f}"
        return f"{what}, {times} us ({self.way}); {gains}"


def one_sided(machine: Machine) -> Machine:
    """The same where every rank's puts reach all others, as those of NVSHMEM do."""
    links = tuple(replace(link, carries=MEMORY) for link in machine.topology.links)
    return replace(machine, topology=replace(machine.topology, links=links))


def row(cluster: Cluster, operator: str) -> Row:
    """All plans of an operator on a cluster, simulated."""
    machine, (m, n, k) = load(cluster.machine), SIZES[operator]
    problem = Problem(operator=operator, m=m, n=n, k=k, world_size=RANKS, dtype="bfloat16")
    parted = replace(problem, islands=machine.islands)
    flat, crossing = ("push", {"carrier": "copy_engine"}) if operator == GATHER else ("scatter", {})
    open_machine = one_sided(machine)
    total_bytes = 2.0 * m * (k if operator == GATHER else n)
    function = "all_gather" if operator == GATHER else "reduce_scatter"
    way = crossing_of(machine, function, tuple(range(RANKS)), total_bytes)
    return Row(
        cluster=cluster,
        operator=operator,
        matmul_us=library_matmul_us(machine, (m, n, k), "bfloat16"),
        times_us={
            LIBRARY: simulated_us("sequential", parted, machine),
            LEVELS: min(simulated_us("islands", parted, machine, {"pieces": pieces}) for pieces in PIECES),
            ONE_SIDED: simulated_us("islands", problem, open_machine, {"island": OF_A_HOST, **crossing}),
            FLAT: simulated_us(flat, problem, open_machine),
        },
        way=way.name if way else "",
    )


def simulated_us(plan: str, problem: Problem, machine: Machine, options: dict[str, str | int] | None = None) -> float:
    """The time of a plan, of one island where a group is large."""
    kernel = "hopper" if any(tile.kernel == "hopper" for tile in machine.tiles) else "portable"
    known: dict[str, str | int] = {} if plan == "sequential" else {"sms": machine.processor.sms, "kernel": kernel}
    only = ranks_to_simulate(machine, problem.world_size)
    return total_us(build(f"{problem.operator}.{plan}", problem, {**known, **(options or {})}, only=only), machine)


class LargeGroup(Struct, frozen=True):
    """Seconds of the processor that predictions of a group took."""

    ranks: int
    plan: str
    us: float
    took_s: float

    def __str__(self) -> str:
        return f"{self.ranks:5d} ranks  {self.plan:34s} {self.us:9.0f} us, predicted in {self.took_s:.2f} s"


def large_groups(ranks: Iterable[int]) -> Iterator[LargeGroup]:
    """Both operators with 8,192 rows for each host, on hosts of H800s."""
    for count in ranks:
        machine = machine_of_ranks("h800x8x2", count)
        for operator in SIZES:
            n, k = (49152 // RANKS, 12288) if operator == GATHER else (12288, 49152 // RANKS)
            problem = Problem(
                operator=operator,
                m=8192 * count // OF_A_HOST,
                n=n,
                k=k,
                world_size=count,
                dtype="bfloat16",
                islands=islands_among(machine, count),
            )
            for plan in (LIBRARY, LEVELS):
                begun = time.process_time()
                us = simulated_us(plan, problem, machine)
                yield LargeGroup(count, f"{operator}.{plan}", us, time.process_time() - begun)


def verdicts(rows: list[Row], groups: list[LargeGroup]) -> list[Verdict]:
    found = list[Verdict]()
    for cluster in CLUSTERS:
        own = [each for each in rows if each.cluster == cluster]
        speedup = max(each.speedup(each.best) for each in own)
        efficiency = max(each.efficiency(each.best) for each in own)
        is_near = abs(speedup / cluster.speedup - 1.0) <= TOLERANCE
        told = f"{speedup:.2f} and {efficiency:.0%}" + ("" if is_near else f" ({cluster.reason})")
        promise = f"{cluster.machine}: the paper's {cluster.speedup:.2f} times as fast, and {cluster.efficiency:.0%}"
        found.append(Verdict(promise, told, is_near or (None if cluster.reason else False)))
    (gather,) = (each for each in rows if (each.cluster.machine, each.operator) == ("h800x8x2", GATHER))
    gain = gather.times_us[FLAT] / gather.times_us[ONE_SIDED]
    quick = f"a gather by islands of 8 at least {LEAST_GAIN:g} times as quick as one flat push"
    found.append(Verdict(quick, f"{gain:.1f}", gain >= LEAST_GAIN))
    longest = max(groups, key=lambda each: each.took_s, default=None)
    if longest is not None:
        within = f"each prediction of a large group within {MOST_S:g} s of the processor"
        found.append(Verdict(within, f"at most {longest}", longest.took_s <= MOST_S))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="*", type=int, default=[64, 256], metavar="N", help="of large groups")
    asked = parser.parse_args(arguments)
    rows, groups = list[Row](), list[LargeGroup]()
    try:
        for cluster in CLUSTERS:
            for operator in SIZES:
                rows.append(row(cluster, operator))
                print(rows[-1], flush=True)
        for each in large_groups(asked.ranks):
            groups.append(each)
            print(each, flush=True)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return tell(verdicts(rows, groups))


if __name__ == "__main__":
    sys.exit(main())
