"""`overweave bench block --simulate`: predicted times of blocks, beside torch's sequential way and its fusing pass."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from overweave.block.cases import BLOCK, read_blocks
from overweave.block.predicted import PredictedBlock, fused_by_torch, predicted
from overweave.cli.bench_table import LEAST_WIDTH
from overweave.cli.output_file import check_file, write_file
from overweave.errors import InputError
from overweave.moe.cases import EXPERTS
from overweave.tuner.space.target import target_named

COLUMNS = (
    "", "library\nus", "torch's pass\nus", "sites\nthat it fuses", "overweave\nus", "faster than\nlibrary",
    "faster than\ntorch's pass",
)  # fmt: skip


def predict_blocks(subject: str, shapes: str, place: tuple[str, int], file: Path | None) -> None:
    """Print a line for each case and a line for each of its matmuls. place: a machine and the number of ranks; 0: four.
    Raises InputError for anything but blocks, and for a machine without GPUs for so many ranks."""
    name, ranks = place[0], place[1] or 4
    if subject != BLOCK:
        cure = f"Ask `overweave simulate` or `overweave explain`, or for {BLOCK} or {EXPERTS}"
        raise InputError(f"bench {subject[:60]} --simulate {name}", "operators are benched on ranks", cure)
    target = target_named(name, ranks)
    if file is not None:
        check_file(file)
    cases = read_blocks(shapes or "llama").cases
    blocks = tuple(predicted(case, ranks, target, fused_by_torch(case, ranks)) for case in cases)
    if file is not None:
        write_file(file, msgspec.json.format(msgspec.json.encode(blocks), indent=1) + b"\n")
    console = Console()
    console.width = max(console.width, LEAST_WIDTH)
    console.print(_table(blocks, f"{BLOCK}: predicted for {ranks} ranks, bf16"))
    console.print(f"Machine: {target.found}", markup=False, soft_wrap=True)
    for block in blocks:
        for site in block.sites:
            console.print(
                f"{block.case} {site.name}: {site.plan}, {site.overweave_us:.1f} us", markup=False, soft_wrap=True
            )


def _table(blocks: tuple[PredictedBlock, ...], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right", no_wrap=True)
    for each in blocks:
        times = each.sequential_us, each.torch_us, each.overweave_us
        library, torch, ours = (f"{us:.1f}" for us in times)
        ratios = (f"{us / each.overweave_us:.3f}" for us in times[:2])
        table.add_row(Text(each.case), library, torch, f"{sum(each.fused)} of {len(each.sites)}", ours, *ratios)
    return table
