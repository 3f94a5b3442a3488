"""`overweave bench block --simulate`: predicted times of blocks, beside torch's sequential way and its fusing pass."""

from __future__ import annotations

from pathlib import Path

from overweave.block.cases import BLOCK, read_blocks
from overweave.block.predicted import PredictedBlock, fused_by_torch, predicted
from overweave.cli.predictions import Predictions, place_of, print_predictions
from overweave.errors import InputError
from overweave.moe.cases import EXPERTS

COLUMNS = (
    "", "library\nus", "torch's pass\nus", "sites\nthat it fuses", "overweave\nus", "faster than\nlibrary",
    "faster than\ntorch's pass",
)  # fmt: skip


def predict_blocks(subject: str, shapes: str, asked: tuple[str, int], file: Path | None) -> None:
    """Print a line for each case and a line for each of its matmuls. asked: a machine and the number of ranks; 0: four.
    Raises InputError for anything but blocks, and for a machine without GPUs for so many ranks."""
    if subject != BLOCK:
        cure = f"Ask `overweave simulate` or `overweave explain`, or for {BLOCK} or {EXPERTS}"
        raise InputError(f"bench {subject[:60]} --simulate {asked[0]}", "operators are benched on ranks", cure)
    place = place_of(asked, file)
    target, ranks = place
    cases = read_blocks(shapes or "llama").cases
    blocks = tuple(predicted(case, ranks, target, fused_by_torch(case, ranks)) for case in cases)
    lines = [
        f"{block.case} {site.name}: {site.plan}, {site.overweave_us:.1f} us" for block in blocks for site in block.sites
    ]
    title = f"{BLOCK}: predicted for {ranks} ranks, bf16"
    print_predictions(place, Predictions(blocks, title, COLUMNS, [*map(_cells, blocks)], lines), file)


def _cells(block: PredictedBlock) -> tuple[str, ...]:
    times = block.sequential_us, block.torch_us, block.overweave_us
    library, torch, ours = (f"{us:.1f}" for us in times)
    ratios = (f"{us / block.overweave_us:.3f}" for us in times[:2])
    return block.case, library, torch, f"{sum(block.fused)} of {len(block.sites)}", ours, *ratios
