"""Plans that lack one wait: of an operation, or of a row of a table."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from overweave.ir.plan import Plan
from overweave.ir.schedule import Wait
from overweave.ir.tile_order import NO_SIGNAL, TileRow
from overweave.ir.verify.plan import MachineLimits, verify_plan


def without_one_wait(plan: Plan) -> Iterator[Plan]:
    """The plan without one signal of one wait, whoever waits; tables are left as they are."""
    schedule = plan.schedule
    for index, operation in enumerate(schedule.operations):
        for field in ("waits", "late_waits"):
            waits: tuple[Wait, ...] = getattr(operation, field, ())
            for at, wait in enumerate(waits):
                lo, hi = wait.signals
                for signals in dict.fromkeys(((lo + 1, hi), (lo, hi - 1))):
                    left = (replace(wait, signals=signals),) if signals[0] < signals[1] else ()
                    changed = replace(operation, **{field: (*waits[:at], *left, *waits[at + 1 :])})
                    operations = (*schedule.operations[:index], changed, *schedule.operations[index + 1 :])
                    yield replace(plan, schedule=replace(schedule, operations=operations))


def without_one_emitted_wait(plan: Plan) -> Iterator[Plan]:
    """The plan whose tables lack one wait of one row: what the fused kernel would wait for."""
    for index, order in enumerate(plan.tile_orders):
        for at, row in enumerate(order.rows):
            for lesser in lesser_waits(row):
                rows = (*order.rows[:at], lesser, *order.rows[at + 1 :])
                orders = (*plan.tile_orders[:index], replace(order, rows=rows), *plan.tile_orders[index + 1 :])
                yield replace(plan, tile_orders=orders)


def lesser_waits(row: TileRow) -> Iterator[TileRow]:
    """The row without one of its signals, or content with a count too small."""
    if row.wait_lo < row.wait_hi:
        yield row._replace(wait_lo=row.wait_lo + 1)
        yield row._replace(wait_count=row.wait_count - 1)
    if row.also != NO_SIGNAL:
        yield row._replace(also=NO_SIGNAL)


def is_proven(plan: Plan) -> bool:
    return verify_plan(plan, MachineLimits()).ok
