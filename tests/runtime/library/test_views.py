"""Places of regions: all of a buffer, a part of it, and parts of a collective that are one."""

from __future__ import annotations

import pytest
import torch

from overweave.ir.schedule import Collective, Copy, Region
from overweave.runtime.library.calls import Views, merge_parts

SHAPES = {"x": (4, 6), "whole": (12, 6)}


def part(lo: int, hi: int, cols: tuple[int, int] = (0, 6), rank: int = 0) -> Region:
    return Region("whole", rank, (lo, hi), cols)


def collective(function: str, sources: tuple[Region, ...], destinations: tuple[Region, ...]) -> Collective:
    return Collective(
        name="all", rank=0, queue="main", function=function, label="all", ranks=(0, 1, 2),
        sources=sources, destinations=destinations,
    )  # type: ignore[arg-type]  # fmt: skip


def test_a_region_is_its_buffer_or_a_part_of_it():
    operation = Copy(
        name="c", rank=0, queue="main", sources=(Region("x", 0, (0, 4), (0, 6)),), destinations=(part(4, 8, (1, 3)),)
    )
    tensors = {"x": torch.zeros(4, 6), "whole": torch.arange(72).view(12, 6)}
    view = Views((operation,), SHAPES).of(tensors)
    assert view(operation.sources[0]) is tensors["x"]
    assert torch.equal(view(operation.destinations[0]), tensors["whole"][4:8, 1:3])


def test_parts_behind_each_other_are_one():
    own, parts = (Region("x", 0, (0, 4), (0, 6)),), (part(0, 4), part(4, 8), part(8, 12))
    gathered = merge_parts(collective("all_gather", own, parts), SHAPES, {})
    assert (gathered.reads, gathered.writes) == (own, (part(0, 12),))
    scattered = merge_parts(collective("reduce_scatter", parts, own), SHAPES, {})
    assert (scattered.reads, scattered.writes) == ((part(0, 12),), own)
    both = merge_parts(collective("all_to_all", parts, parts), SHAPES, {})
    assert both.reads == both.writes == (part(0, 12),)
    one_sided = collective("all_to_all", parts, (part(0, 4), part(8, 12), part(4, 8)))
    assert merge_parts(one_sided, SHAPES, {}) == one_sided


def test_short_parts_at_the_end_are_padded_behind_the_rows_of_a_buffer():
    own = (part(0, 4),)
    for parts in ((part(0, 4), part(4, 8), part(8, 10)), (part(0, 4), part(4, 8), part(8, 8))):
        for function, side in (("all_gather", "writes"), ("reduce_scatter", "reads")):
            sides = (own, parts) if function == "all_gather" else (parts, own)
            operation, end = collective(function, *sides), parts[-1].rows[1]
            assert getattr(merge_parts(operation, SHAPES, {"whole": end}), side) == (part(0, 12),)
            for there in ({}, {"whole": end + 1}):  # a row that padding would lie over
                assert merge_parts(operation, SHAPES, there) == operation
            assert merge_parts(operation, {**SHAPES, "whole": (11, 6)}, {"whole": end}) == operation  # no room
    gap = collective("all_gather", own, (part(0, 2), part(4, 8), part(8, 12)))
    assert merge_parts(gap, SHAPES, {"whole": 12}) == gap


@pytest.mark.parametrize(
    "parts",
    [
        (part(0, 5), part(5, 10), part(10, 12)),  # the last one is short: the library deals equal ones
        (part(0, 4), part(8, 12), part(4, 8)),
        (part(0, 4, (0, 3)), part(4, 8, (0, 3)), part(8, 12, (0, 3))),
    ],
    ids=["uneven", "in another order", "columns"],
)
def test_other_parts_stay_apart(parts: tuple[Region, ...]):
    operation = collective("all_gather", (part(0, 4),), parts)
    assert merge_parts(operation, SHAPES, {}) == operation
