"""Views of an operation's regions in tensors: their indices are computed once for all calls."""

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
    """Return the shapes of tensors by name; x and w in two parts have the shape of both together."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if X_REST in shapes:
        (rows, k), (_, cols) = shapes["x"], shapes["w"]
        k += shapes[X_REST][1]
        shapes |= {"x": (rows, k), "w": (k, cols)}
    return shapes


class Views:
    """Computes views of the regions of operations. shapes: of the buffers."""

    def __init__(self, operations: Iterable[Operation], shapes: Mapping[str, ViewShape]) -> None:
        regions = [region for operation in operations for region in (*operation.reads, *operation.writes)]
        # The region itself is kept alive: its id is the key.
        self._indices = {id(region): (region, region.buffer, region_index(region, shapes)) for region in regions}

    def of(self, tensors: Mapping[str, torch.Tensor]) -> View:
        """Return a function from a region to its view in these tensors, by buffer name."""
        indices = self._indices

        def view(region: Region) -> torch.Tensor:
            _, buffer, index = indices[id(region)]
            return tensors[buffer] if index is None else tensors[buffer][index]

        return view


def padded_rows(rows: int, parts: int) -> int:
    """Round rows up to a multiple of `parts`, so that `merge_parts` can merge them as equal parts."""
    return -(-rows // parts) * parts


def merge_parts(operation: Operation, shapes: Mapping[str, ViewShape], buffer_rows: Mapping[str, int]) -> Operation:
    """Return the operation; a collective whose equal parts are adjacent in a buffer becomes one of a single part.

    buffer_rows: buffer -> its rows, if its memory has more (as of `shapes`). The last parts may then be shorter, or
    empty: the merged part extends over the padding, which is never read.
    """
    if isinstance(operation, Collective) and operation.function == "all_gather":
        return replace(operation, destinations=_merge_parts(operation.destinations, shapes, buffer_rows))
    if isinstance(operation, Collective) and operation.function == "reduce_scatter":
        return replace(operation, sources=_merge_parts(operation.sources, shapes, buffer_rows))
    if isinstance(operation, Collective) and operation.function == "all_to_all":
        sources, destinations = (_merge_parts(side, shapes, {}) for side in (operation.sources, operation.destinations))
        if len(sources) == len(destinations) == 1:
            return replace(operation, sources=sources, destinations=destinations)
    return operation


def _merge_parts(
    parts: tuple[Region, ...], shapes: Mapping[str, ViewShape], buffer_rows: Mapping[str, int]
) -> tuple[Region, ...]:
    """Return adjacent equal parts of one buffer as one part; others unchanged."""
    first, size = parts[0], parts[0].shape[0]
    rows, cols = shapes[first.buffer]
    top, last = first.rows[0], buffer_rows.get(first.buffer, rows)
    bounds = [min(top + at * size, last) for at in range(len(parts) + 1)]
    is_one_buffer = all((part.buffer, part.rank, part.cols) == (first.buffer, first.rank, (0, cols)) for part in parts)
    if not is_one_buffer or [part.rows for part in parts] != list(pairwise(bounds)) or top + len(parts) * size > rows:
        return parts
    return (replace(first, rows=(top, top + len(parts) * size)),)


def region_index(region: Region, shapes: Mapping[str, ViewShape]) -> Cut | None:
    """Return the index of a region in its buffer: None for the whole buffer, one slice for whole rows."""
    rows, cols = shapes.get(region.buffer, (-1, -1))
    if region.cols != (0, cols):
        return slice(*region.rows), slice(*region.cols)
    return None if region.rows == (0, rows) else slice(*region.rows)
