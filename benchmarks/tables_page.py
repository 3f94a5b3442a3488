"""Writes docs/tables.md, and its pictures, from the result files of compiled kernels and of back ends.

python -m benchmarks.tables_page             rewrites the page
python -m benchmarks.tables_page --pictures  and draws docs/pictures/tables.*.png, where matplotlib is installed
python -m benchmarks.tables_page --check     exit 1 if the page is not what the files say
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from campaigns.tables.table_rows import COMPILED, PORTABLE, TABLES, Row, grid, grids, read, verdicts

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tables.md"
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"
HEAD = """# Tables of compiled kernels and back ends

Written by `python -m benchmarks.tables_page` from the files in `benchmarks/results`; nothing here is typed by hand.
All methods of a table of one operator were interleaved by one timer, ranks aligned, and the slowest rank counts.
Compiled kernels are `examples/kernels/matmul.py` and `persistent.py`, fused by `ow.compile`.
"""
# What a reader must know of a table to read it.
NOTES = {
    "against": "Each case with the quickest of a few tiles and schedules, chosen by a few rounds before; the portable"
    " kernel with the quickest of its pieces.",
    "backends": "One tile shape, all else alike. In brackets: the SMs of a kernel that only moves. A column: into how"
    " many chunks a shard is cut. AutoOverlap, Figures 11a to 11c.",
    "tiles": "One schedule, all else alike. A column: how many blocks of rows run together, column by column."
    " AutoOverlap, Figure 11d.",
    "streamed": "Of all gathered rows. Streamed: tiles of one kernel wait for chunks. Split: a captured sequence of"
    " matmuls, each behind the copy of its chunk; nothing is signalled. AutoOverlap, Figure 2b.",
    "tuner": "`ow.compile_auto(...).tune`, timed anew beside the best rows of the tables of back ends and"
    " of tiles that the same file has.",
    "bandwidth": "Launch included; what leaves a rank. AutoOverlap, Figures 2c and 2d.",
    "compile": "From a kernel's text to the module that Triton is given: read, planned, proven, written.",
}
TORCHRUN = "torchrun --standalone --nproc-per-node {} -m campaigns."
PARTS = (name for name in TABLES if name not in ("bandwidth", "compile"))
# What measures a table again; {} stands for the number of GPUs.
COMMANDS = {
    **{part: f"{TORCHRUN}compiled_tables --parts {part} --csv FILE" for part in PARTS},
    "bandwidth": f"{TORCHRUN}backend_bandwidth --csv FILE",
    "compile": "python -m campaigns.compile_times --csv FILE",
}
CPU = "cpu"
# What a file is not, of what is in the repository now.
REMARKS = {
    "backend_bandwidth.h200x2.2026-11-22.csv": "Bulk rows are of buffers of 4 KiB; those of 16 and 22 KiB, which copies"
    " go through since, are not measured.",
}


class Source(NamedTuple):
    """A table as one file has it. machine and date: as the name of the file says."""

    table: str
    machine: str
    date: str
    file: str
    rows: list[Row]


def sources() -> list[Source]:
    """Every table of every machine, the latest that there is."""
    found: dict[tuple[str, str], Source] = {}
    for path in sorted(RESULTS.glob("*.*.*.csv")):
        _, machine, date, _ = path.name.split(".")
        rows = bandwidth(path) if path.name.startswith("backend_bandwidth.") else read(path)
        for table in dict.fromkeys(row.table for row in rows):
            own = [row for row in rows if row.table == table]
            known = found.get((table, machine))
            if known is None or known.date <= date:
                found[table, machine] = Source(table, machine, date, path.name, own)
    order = list(TABLES)
    return sorted(found.values(), key=lambda one: (order.index(one.table), one.machine))


def bandwidth(path: Path) -> list[Row]:
    """What campaigns.rates.backend_bandwidth wrote: a panel per back end, a line per number of SMs."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    rows = []
    for line in lines:
        alone = line["sms"] == "0"
        panel = "none of our SMs" if alone else line["back_end"].replace("load_store", "load/store")
        series = line["back_end"].replace("_", " ") if alone else f"{line['sms']} SMs"
        took_us, size = float(line["us"]), str(int(line["bytes"]) >> 10)
        rows.append(Row("bandwidth", panel, "", series, size, "", took_us, took_us, float(line["gb_per_s"])))
    return rows


def page() -> str:
    """The whole page."""
    found = sources()
    sections = [section(one) for one in found] or ["No table has been measured yet.\n"]
    return "\n".join([HEAD, *([contents(found)] if found else []), *sections])


def contents(found: Sequence[Source]) -> str:
    """Which table is of which machine, from which file and by which command; what is of two GPUs alone, and missing."""
    lines = ["| table | measured on | file | measured again by |", "| --- | --- | --- | --- |"]
    for one in found:
        command = COMMANDS[one.table].format(_gpus(one.machine))
        lines.append(f"| {TABLES[one.table].title} | {_named(one.machine)} | `{one.file}` | `{command}` |")
    largest = {one.table: max(_gpus(other.machine) for other in found if other.table == one.table) for one in found}
    fewer = [TABLES[table].title for table, gpus in largest.items() if gpus == 2]
    missing = [TABLES[table].title for table in TABLES if table not in largest]
    lines += ["", f"On two GPUs alone: {'; '.join(fewer)}."] if fewer else []
    lines += ["", f"Not measured: {'; '.join(missing)}."] if missing else []
    return "\n".join([*lines, ""])


def _gpus(machine: str) -> int:
    """How many, as the name of a file says; 0 of a CPU."""
    return 0 if machine == CPU else int(machine.rpartition("x")[2])


def _named(machine: str) -> str:
    return "a CPU" if machine == CPU else f"{_gpus(machine)} x NVIDIA {machine.partition('x')[0].upper()}"


def section(source: Source) -> str:
    """One table with what it promises."""
    table, lines = TABLES[source.table], [f"## {TABLES[source.table].title}, {_named(source.machine)}", ""]
    lines += [f"{NOTES[source.table]} `{source.file}`; {table.unit}:", ""]
    lines += [REMARKS[source.file], ""] if source.file in REMARKS else []
    for (_, operator, shape), rows in grids(source.rows).items():
        if operator:
            lines += [f"**{operator}** {shape}".rstrip(), ""]
        lines += [*markdown(grid(rows)), ""]
    lines += [line for row in source.rows if (line := _how(row))]
    found = verdicts(source.rows)
    lines += [*(f"- {verdict}" for verdict in found), ""] if found else []
    picture = picture_of(source)
    if picture.is_file():
        lines += [f"![{TABLES[source.table].title}]({picture.relative_to(PAGE.parent)})", ""]
    return "\n".join(lines)


def markdown(lines: list[list[str]]) -> list[str]:
    """A table, its head first."""
    head, *body = lines
    rule = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(line) + " |" for line in (head, rule, *body)]


def _how(row: Row) -> str:
    """What ran, where it was chosen case by case."""
    is_told = row.table == "against" and row.series in (COMPILED, PORTABLE)
    return f"- {row.operator}, {row.x}, {row.series}: `{row.how}`" if is_told else ""


def picture_of(source: Source) -> Path:
    return PICTURES / f"tables.{source.table}.{source.machine}.png"


def draw() -> None:
    """Every table that is better seen."""
    from campaigns.tables.table_pictures import DRAWN, save_table

    for source in sources():
        if source.table in DRAWN:
            save_table(picture_of(source), source.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--pictures", action="store_true")
    asked = parser.parse_args()
    if asked.pictures:
        draw()
    if not asked.check:
        PAGE.write_text(page())
    elif not PAGE.is_file() or PAGE.read_text() != page():
        sys.exit("docs/tables.md differs from benchmarks/results: run python -m benchmarks.tables_page")


if __name__ == "__main__":
    main()
