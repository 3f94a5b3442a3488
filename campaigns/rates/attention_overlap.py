"""How much of what travels does attention hide? Overlap ratios of each plan, simulated, as TileLink's Figure 10.

    python -m campaigns.attention_overlap [--machine h200x8] [--worlds 4 8] [--only Attn-1]

Attn-1 and Attn-2 from 16k to 128k tokens, causal, over contiguous rows as TileLink has it, and over zigzag ones;
forward, and forward with backward. A ratio is what of the library's gather alone (and, backward, of its scatter) is
hidden beside what a rank computes: (compute + communication - call) / communication; what balances work between
ranks, as heads do, shows more than one. Then how much quicker zigzag rows are than contiguous ones, and what memory a
ring has.
PASS: of eight ranks and the longest sequence at least 1.8 times; at most 2 + 1/W shards of keys and values on a level.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from statistics import mean
from typing import NamedTuple

import torch
from msgspec.structs import replace

from campaigns.shown import shown
from campaigns.verdict import Verdict, tell
from overweave.attention.cases import LAYOUTS, AttentionCase, read_attention
from overweave.attention.predicted import predicted
from overweave.attention.rings import RingTravel
from overweave.attention.sequence import CONTIGUOUS, ZIGZAG
from overweave.hardware.machine import load
from overweave.schedules.records.attention import HEADS, RING, SEQUENTIAL
from overweave.tuner.measure.predicted_plans import Predicted

BALANCED, OF_RANKS = 1.8, 8


class Row(NamedTuple):
    """One case on so many ranks."""

    ranks: int
    found: Predicted[AttentionCase]

    def __str__(self) -> str:
        ratios = ((plan, self.found.measures(plan).overlap_ratio) for plan in self.found.plans if plan != SEQUENTIAL)
        told = " ".join(f"{plan} {us:7.0f} {ratio:5.2f}" for (plan, ratio), us in zip(ratios, self._times, strict=True))
        alone = f"alone {self.found.alone_us:7.0f} link {self.found.link_us:6.0f} sequential {self._sequential:7.0f}"
        return f"W={self.ranks} {self.found.case.name:44s} {alone} | {told} | {self.found.choice}"

    @property
    def _times(self) -> list[float]:
        return [us for plan, us in self.found.plans.items() if plan != SEQUENTIAL]

    @property
    def _sequential(self) -> float:
        return self.found.plans[SEQUENTIAL]


def rows(machine: str, worlds: list[int], only: str) -> Iterator[Row]:
    chosen = replace(read_attention("attention"), layouts=LAYOUTS)
    cases = [(ranks, case) for ranks in worlds for case in chosen.on_ranks(ranks) if only in case.name]
    for ranks, case in shown(cases, "cases", len(cases)):
        yield Row(ranks, predicted(case, ranks, load(machine)))


def verdicts(found: list[Row]) -> Iterator[Verdict]:
    for ranks in dict.fromkeys(row.ranks for row in found):
        for is_trained in (False, True):
            own = [row.found for row in found if row.ranks == ranks and row.found.case.is_trained == is_trained]
            what = f"W={ranks} {'forward with backward' if is_trained else 'forward'}"
            for layout in LAYOUTS:
                ratios = [each.measures(RING).overlap_ratio or 0.0 for each in own if each.case.layout == layout]
                told = f"{mean(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
                yield Verdict(f"{what}: overlap ratio of a ring, {layout} rows, in the mean", told, None)
            yield from _balance(what, own, ranks)
        yield from _memory(ranks)


def _balance(what: str, own: list[Predicted[AttentionCase]], ranks: int) -> Iterator[Verdict]:
    """How much quicker zigzag rows are, of the quickest plan that moves keys. Only forward is promised."""
    times = {(each.case.heads_name, each.case.tokens, each.case.layout): _quickest(each) for each in own}
    for (name, tokens, layout), us in times.items():
        if layout == CONTIGUOUS:
            ratio = us / times[name, tokens, ZIGZAG]
            is_promised = ranks == OF_RANKS and tokens == max(each.case.tokens for each in own)
            holds = ratio >= BALANCED if is_promised and not own[0].case.is_trained else None
            yield Verdict(f"{what}: zigzag rows of {name}, {tokens} tokens, times as quick", f"{ratio:.3f}", holds)


def _quickest(found: Predicted[AttentionCase]) -> float:
    return min(us for plan, us in found.plans.items() if plan not in (SEQUENTIAL, HEADS))


def _memory(ranks: int) -> Iterator[Verdict]:
    """Of what peers write, beside the caller's own shard."""
    case = read_attention("attention").on_ranks(ranks)[0]
    shard = 2 * case.tokens // ranks * case.columns * 2
    buffers = RingTravel(case.sequence(ranks), case.columns, torch.bfloat16).declared().buffers
    shards = sum(each.size_bytes for each in buffers.values()) / shard
    promise = f"W={ranks} forward: memory of a ring in shards of keys and values, beside the own one"
    yield Verdict(promise, f"{shards:.2f}", shards <= 2 + 1 / ranks)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="h200x8")
    parser.add_argument("--worlds", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--only", default="", help="cases with this in their name")
    asked = parser.parse_args()
    found = []
    for row in rows(asked.machine, asked.worlds, asked.only):
        found.append(row)
        print(row, flush=True)
    return tell(verdicts(found))


if __name__ == "__main__":
    sys.exit(main())
