"""Tables whose tiles are dealt out along k, each broken in one way."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.tile_order import TileOrder, TileRow
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build

Change = Callable[[list[TileRow]], list[TileRow]]


def dealt() -> Plan:
    problem = Problem(operator="matmul_reduce_scatter", m=512, n=256, k=512, world_size=2, dtype="bfloat16")
    return build("matmul_reduce_scatter.scatter", problem, {"kernel": "hopper", "block_n": 128, "split_k": 2})


def refusals(change: Change) -> str:
    """With one rank's table changed."""
    plan = dealt()
    orders = tuple(
        TileOrder(order.rank, order.queue, tuple(change(list(order.rows))))
        if (order.rank, order.queue) == (0, "tiles")
        else order
        for order in plan.tile_orders
    )
    verdict = verify_plan(replace(plan, tile_orders=orders), MachineLimits())
    return "\n".join(map(str, verdict.refusals))


def at(position: int, **changes: int) -> Change:
    def change(rows: list[TileRow]) -> list[TileRow]:
        rows[position] = rows[position]._replace(**changes)
        return rows

    return change


def test_untouched_it_is_proven():
    assert refusals(lambda rows: rows) == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[1:], r"are \[1\] of 2"),
        (lambda rows: [rows[0], *rows], r"are \[0, 0, 1\] of 2"),
        (at(0, k_hi=192), "are not all of k=512 once"),
        (at(1, k_hi=448), "are not all of k=512 once"),
        (at(0, share=1), r"are \[1, 1\] of 2"),
        (at(1, col=128), "differ in more than their range of k"),
        (at(1, signal=3), "differ in more than their range of k"),
        (at(2, partial=1), "are "),
        (at(0, shares=0), "a whole tile has a range of k"),
    ],
)
def test_shares_that_are_not_one_tile_are_refused(change: Change, said: str):
    found = refusals(change)
    assert re.search(said, found), found


def test_steps_are_not_cut():
    def change(rows: list[TileRow]) -> list[TileRow]:
        return [rows[0]._replace(k_hi=250), rows[1]._replace(k_lo=250), *rows[2:]]

    assert "do not begin at steps of 64" in refusals(change)


def test_places_of_two_tiles_overlap():
    def change(rows: list[TileRow]) -> list[TileRow]:
        return [rows[0], rows[1], *(row._replace(partial=row.partial - 1) for row in rows[2:])]

    assert "two tiles share slot" in refusals(change)


def test_a_tile_is_announced_once():
    """As a table of whole tiles would be, whose rows each announce."""
    assert "adds as much" not in refusals(lambda rows: rows)
    whole = refusals(lambda rows: [row._replace(k_lo=0, k_hi=0, share=0, shares=0, partial=0) for row in rows])
    assert "tiles" in whole
