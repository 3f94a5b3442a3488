"""Which tensors a library's operations see: places of regions in their buffers, worked out once for all calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from msgspec.structs import replace

from overweave.ir.plan import X_REST
from overweave.ir.schedule import Collective, Operation, Region
from overweave.runtime.library.library import View

ViewShape = tuple[int, ...]
Cut = slice | tuple[slice, slice]


def shapes_of(tensors: Mapping[str, Any]) -> dict[str, ViewShape]:
    """Of buffers by name; factors in two parts have that of both together."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if X_REST in shapes:
        (rows, k), (_, cols) = shapes["x"], shapes["w"]
        k += shapes[X_REST][1]
        shapes |= {"x": (rows, k), "w": (k, cols)}
    return shapes


class Views:
    """The views of operations on this rank, whose buffers have these shapes."""

    def __init__(self, operations: Iterable[Operation], shapes: Mapping[str, ViewShape]) -> None:
        regions = [region for operation in operations for region in (*operation.reads, *operation.writes)]
        # A region stays what its number stands for: it is kept here.
        self._known = {id(region): (region, region.buffer, region_index(region, shapes)) for region in regions}

    def of(self, tensors: Mapping[str, torch.Tensor]) -> View:
        """The own tensor of each region, in these tensors by buffer."""
        known = self._known

        def view(region: Region) -> torch.Tensor:
            _, buffer, place = known[id(region)]
            return tensors[buffer] if place is None else tensors[buffer][place]

        return view


def padded_rows(rows: int, parts: int) -> int:
    """How many rows of memory a buffer of so many needs for `merge_parts` to make parts of it equal ones."""
    return -(-rows // parts) * parts


def merge_parts(operation: Operation, shapes: Mapping[str, ViewShape], ends: Mapping[str, int]) -> Operation:
    """The operation; a collective whose equal parts stand one behind the other in a buffer, as one of a single part.

    ends: the rows of buffers whose memory has more, as `shapes` say. Of parts that end there the trailing ones may be
    short, or empty: what they are padded with is nobody's.
    """
    if isinstance(operation, Collective) and operation.function == "all_gather":
        return replace(operation, destinations=_merge_parts(operation.destinations, shapes, ends))
    if isinstance(operation, Collective) and operation.function == "reduce_scatter":
        return replace(operation, sources=_merge_parts(operation.sources, shapes, ends))
    if isinstance(operation, Collective) and operation.function == "all_to_all":
        sources, destinations = (
            _merge_parts(operation.sources, shapes, {}),
            _merge_parts(operation.destinations, shapes, {}),
        )
        if len(sources) == len(destinations) == 1:
            return replace(operation, sources=sources, destinations=destinations)
    return operation


def _merge_parts(
    parts: tuple[Region, ...], shapes: Mapping[str, ViewShape], ends: Mapping[str, int]
) -> tuple[Region, ...]:
    first, size = parts[0], parts[0].shape[0]
    rows, cols = shapes[first.buffer]
    top, last = first.rows[0], ends.get(first.buffer, rows)
    bounds = [min(top + at * size, last) for at in range(len(parts) + 1)]
    is_one = all((part.buffer, part.rank, part.cols) == (first.buffer, first.rank, (0, cols)) for part in parts)
    if not is_one or [part.rows for part in parts] != list(pairwise(bounds)) or top + len(parts) * size > rows:
        return parts
    return (replace(first, rows=(top, top + len(parts) * size)),)


def region_index(region: Region, shapes: Mapping[str, ViewShape]) -> Cut | None:
    """What a region is of its buffer, of these shapes: None if it is all of it, one slice if it is whole rows."""
    rows, cols = shapes.get(region.buffer, (-1, -1))
    if region.cols != (0, cols):
        return slice(*region.rows), slice(*region.cols)
    return None if region.rows == (0, rows) else slice(*region.rows)
