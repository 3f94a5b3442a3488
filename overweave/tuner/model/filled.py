"""How the tiles of a plan's matmul fill a GPU, in a sentence for `explain`."""

from __future__ import annotations

from math import ceil

from overweave.ir.problem import Problem
from overweave.ir.tile_order import MULTIPLY
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.outside import OUTSIDE
from overweave.tuner.model.choice import Choice


def filled(choice: Choice, problem: Problem) -> str:
    """The tile shape of the first rank, in how many waves its tiles run, and how full the last one is; nothing of a
    plan without a tile kernel, or for a CPU.
    """
    if choice.plan in OUTSIDE or "sms" not in choice.options:
        return ""
    plan = build(choice.plan, problem, choice.options, rank=0)
    config, rows = plan.realization.matmul, [row for order in plan.tile_orders for row in order.rows]
    tiles = [row for row in rows if row.kind == MULTIPLY]
    if config is None or not tiles:
        return ""
    sms = int(choice.options["sms"]) - plan.sms_beside
    waves = sum((row.width or config.block_n) / config.block_n / max(row.shares, 1) for row in tiles) / sms
    last = waves - ceil(waves) + 1
    words = (
        f"Tiles of {config.block_m} x {config.block_n} on {sms} SMs: {waves:.2f} waves, the last one {last:.0%} full"
    )
    if any(row.shares for row in tiles):
        return f"{words}, its tiles dealt out along k."
    return f"{words}, some tiles in narrower parts." if any(row.width for row in tiles) else f"{words}."
