"""Deletes every wait of every compiled kernel, one at a time: the proof must fail each time, and the PTX hold the rest.

    python -m campaigns.lost_waits [--only TEXT] [--world N] [--no-ptx]

Each kernel of examples/kernels is woven with each of its exchanges at a small size. Of its plan, every signal of every
operation's waits is left out in turn, then every wait of every row of the tables that the kernel reads, and `verify`
has to refute what is left. Then the fused text is compiled for Hopper: its waits are counted there and in the PTX, and
the lint holds each to its load. Exit code 1 for a wait that nobody misses, or one too many or too few.
SOURCE: the minimal synchronization of AutoOverlap 5.2.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from campaigns.lint.authored_cases import AUTHORS, CHUNKED_SUMS, KERNELS, PUSHED_BEHIND, Author, authored_case
from campaigns.oracle.fewer_waits import is_proven, without_one_emitted_wait, without_one_wait
from campaigns.shown import shown
from overweave.ir.plan import Plan
from overweave.ops.author.compile import compile
from tools.aot import compile_kernel
from tools.ptx_lint.lint import lint
from tools.ptx_lint.subject import Subject

WAITS_IN_TEXT = "overweave_lang.wait_for_tile("
# Two pieces of whole tiles for each rank, and few tiles beside each other.
SMALL: dict[str, Mapping[str, int]] = {
    "matmul": {"N": 128, "K": 64},
    "persistent": {"N": 128, "K": 64},
    "gate_up": {"N": 128, "K": 64},
    "batched": {"M": 128, "N": 128, "K": 64},
    "norm": {"ROWS": 4, "COLS": 64},
    "layer_norm": {"N": 64},
    "attention": {"Q": 128, "H": 1, "q_start": 0},
}
CUT = {
    "matmul": ("M", 256),
    "persistent": ("M", 256),
    "gate_up": ("M", 256),
    "batched": ("Z", 2),
    "layer_norm": ("M", 4),
    "attention": ("S", 128),
}
MORE = (
    {"A": "all_gather.mesh col_pieces=2 lanes=2"},
    {"A": "all_gather.double_ring"},
    {"A": "all_gather.islands"},
    {"C": "all_reduce.two_shot pieces=2"},
    {"C": "all_reduce.one_shot"},
    *({"C": how} for how in (*CHUNKED_SUMS, *PUSHED_BEHIND)),
)


class Tally(Struct):
    """waits: of operations, and of table rows, that were deleted. missed: deletions that were accepted. counted: waits
    in the text and in the PTX; None if not compiled. findings: of the lint."""

    kernel: str
    exchanges: str
    waits: int = 0
    rows: int = 0
    missed: int = 0
    counted: tuple[int, int] | None = None
    findings: int = 0

    @property
    def is_bad(self) -> bool:
        return bool(self.missed or self.findings) or (self.counted is not None and len(set(self.counted)) > 1)

    def __str__(self) -> str:
        text, ptx = self.counted or ("-", "-")
        numbers = f"{self.waits:>6} {self.rows:>6} {self.missed:>6} {text:>6} {ptx:>6} {self.findings:>8}"
        return f"{self.kernel:<18} {self.exchanges[:70]:<70} {numbers}"


HEAD = f"{'kernel':<18} {'exchanges':<70} {'waits':>6} {'rows':>6} {'missed':>6} {'text':>6} {'PTX':>6} {'findings':>8}"


def small_plan(file: str, author: Author, wanted: Mapping[str, str], world_size: int) -> Plan:
    """The proven plan of a small call."""
    constants = {name: value for name, value in author.constants.items() if type(value) is int}
    numbers = {**author.numbers, **constants, **SMALL[file]}
    if file in CUT:
        axis, of_rank = CUT[file]
        numbers[axis] = of_rank * world_size
    fused = compile(f"{KERNELS / file}.py:{author.name}", wanted)
    return fused.plan(numbers, world_size)


def delete_all(plan: Plan, tally: Tally) -> None:
    """Counts deletions, and those that nobody missed."""
    for broken in without_one_wait(plan):
        tally.waits += 1
        tally.missed += is_proven(broken)
    for broken in without_one_emitted_wait(plan):
        tally.rows += 1
        tally.missed += is_proven(broken)


def count_compiled(folder: Path, file: str, author: Author, wanted: Mapping[str, str]) -> tuple[tuple[int, int], int]:
    """Waits in the text and in the PTX, and what the lint has found."""
    source, contract = authored_case(folder, file, author, wanted)
    text = compile(f"{KERNELS / file}.py:{author.name}", wanted).source()
    compiled = compile_kernel(source)
    waits = len(Subject(compiled, contract).waits)
    return (text.count(WAITS_IN_TEXT), waits), len(lint(compiled, contract))


def main(arguments: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m campaigns.lost_waits", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose kernel and schedules contain this text")
    parser.add_argument("--world", type=int, default=4, help="how many ranks the plans are for")
    parser.add_argument("--no-ptx", action="store_true", help="only delete waits; compile nothing")
    asked = parser.parse_args(arguments)
    print(HEAD)
    tallies: list[Tally] = []
    with tempfile.TemporaryDirectory(prefix="overweave-") as folder:
        parts = [
            (file, author, wanted, Tally(author.name, " ".join(f"{tensor}={how}" for tensor, how in wanted.items())))
            for file, author in AUTHORS.items()
            for wanted in (*author.exchanges, *(MORE if file == "matmul" else ()))
        ]
        parts = [part for part in parts if asked.only in f"{part[3].kernel} {part[3].exchanges}"]
        for file, author, wanted, tally in shown(parts, "plans", len(parts), lambda part: part[3].kernel):
            delete_all(small_plan(file, author, wanted, asked.world), tally)
            if not asked.no_ptx:
                tally.counted, tally.findings = count_compiled(Path(folder), file, author, wanted)
            tallies.append(tally)
            print(tally, flush=True)
    deleted, missed = sum(one.waits + one.rows for one in tallies), sum(one.missed for one in tallies)
    bad = sum(one.is_bad for one in tallies)
    print(f"{len(tallies)} plans, {deleted} waits deleted one at a time, {missed} not missed; {bad} cases to mend")
    return 1 if bad or not tallies else 0


if __name__ == "__main__":
    sys.exit(main())
