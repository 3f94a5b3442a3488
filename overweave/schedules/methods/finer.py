"""The methods of finer-grain overlap: all eight points of one design space, of which four are never chosen."""

from __future__ import annotations

from functools import partial

from overweave.ir.operators import all_gather_matmul, all_to_all_matmul
from overweave.ir.operators.record import Operator
from overweave.ir.plan import COPY_ENGINE
from overweave.schedules.families.finer import Point, finer
from overweave.schedules.records import needs, option_sets, options
from overweave.schedules.records.record import Method, Need

_SUMMARIES = {
    "rows": "pieces of shards by rows from all peers at once",
    "columns": "pieces of shards by columns from all peers at once, products added in fp32",
    "uniform": "every step alike",
    "hetero": "the own shard first",
    "fused": "one library matmul for a step",
    "unfused": "one library matmul for a piece",
}
_SHARDS_ROWS = "the paper drops it: columns are cut where m < k, and there matmuls of fewer rows lose more"
_DROPPED = {
    Point("rows", "uniform", "unfused"): (
        "the paper drops it: it cuts the matmuls of hetero_unfused_1d once more and moves as much"
    ),
    Point("columns", "uniform", "unfused"): _SHARDS_ROWS,
    Point("columns", "hetero", "fused"): _SHARDS_ROWS,
    Point("columns", "hetero", "unfused"): _SHARDS_ROWS,
}
# As the paper lists them, the four that it keeps first.
POINTS = (
    Point("rows", "uniform", "fused"),
    Point("rows", "hetero", "fused"),
    Point("rows", "hetero", "unfused"),
    Point("columns", "uniform", "fused"),
    *_DROPPED,
)


def _needs(point: Point) -> tuple[Need, ...]:
    if point.cut == "columns":
        return (needs.PLAIN_PARTS,)
    return (needs.NO_RESIDUAL, needs.NO_ROW_SCALES) if point.matmul == "fused" else ()


def _method(operator: Operator, point: Point) -> Method:
    return Method(
        operator=operator.name,
        name=point.name,
        summary=", ".join(_SUMMARIES[word] for word in (point.cut, point.steps, point.matmul)),
        source="FiCCO V-B, Figure 11",
        dropped=_DROPPED.get(point, ""),
        write=partial(finer, point),
        moves=(COPY_ENGINE,),
        options=(options.ALL_PEERS, options.CARRIER),
        needs=_needs(point),
        grids=() if point in _DROPPED else (option_sets.AS_IT_IS,),
        margins=(option_sets.NOT_MEASURED,),
    )


GATHERS = tuple(_method(all_gather_matmul.OPERATOR, point) for point in POINTS)
EXCHANGES = tuple(_method(all_to_all_matmul.OPERATOR, point) for point in POINTS)
METHODS = (*GATHERS, *EXCHANGES)
