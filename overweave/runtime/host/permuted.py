"""Buffers whose blocks are permuted, in the emulation: what an operation sees of them, and where its results go."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from overweave.ir.blocks import image_of, runs_of
from overweave.ir.schedule import Buffer, Operation, Region
from overweave.runtime.library.library import View


class Permuted:
    """The permuted buffers of a schedule. memory: the whole tensor of a rank's instance, by buffer and rank."""

    def __init__(self, buffers: Iterable[Buffer], memory: Callable[[str, int], Tensor]) -> None:
        self._buffers = {buffer.name: buffer for buffer in buffers if buffer.blocks is not None}
        self._memory = memory

    def through(self, operation: Operation, view: View) -> tuple[View, Callable[[], None]]:
        """A view in which the operation's regions are matrices, and what then puts its results where they belong."""
        if not any(region.buffer in self._buffers for region in (*operation.reads, *operation.writes)):
            return view, lambda: None
        seen: dict[Region, Tensor] = {}

        def matrix(region: Region) -> Tensor:
            if region.buffer not in self._buffers:
                return view(region)
            if region not in seen:
                seen[region] = torch.empty(region.shape, dtype=self._memory(region.buffer, region.rank).dtype)
                for part, place in self._pieces(region, seen[region]):
                    part.copy_(place)
            return seen[region]

        def store() -> None:
            for region in operation.writes:
                if region in seen:
                    for part, place in self._pieces(region, seen[region]):
                        place.copy_(part)

        return matrix, store

    def stretch(self, regions: tuple[Region, ...], view: View) -> Tensor:
        """What a library call is given for regions: the stretch of memory that they fill, or one region's matrix."""
        buffer = self._buffers.get(regions[0].buffer)
        if buffer is None:
            return view(regions[0])
        parts = tuple((region.rows, region.cols) for region in regions)
        image = image_of(buffer.blocks, (buffer.rows, buffer.cols), parts, by_cells=True)
        assert image.stretch is not None, "verify refuses a collective of anything else"
        return self._memory(buffer.name, regions[0].rank).view(-1)[slice(*image.stretch)]

    def _pieces(self, region: Region, matrix: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Each part of a region's matrix with its place in memory."""
        buffer = self._buffers[region.buffer]
        memory = self._memory(region.buffer, region.rank)
        for run in runs_of(buffer.blocks, (buffer.rows, buffer.cols), (region.rows, region.cols)):
            part = matrix[run.row : run.row + run.rows, run.col : run.col + run.cols]
            yield part, memory.as_strided((run.rows, run.cols), (run.pitch, 1), memory.storage_offset() + run.start)
