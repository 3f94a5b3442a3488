"""Buffers whose blocks are permuted, in the emulation: what an operation sees of them, and where its results go."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from overweave.ir.blocks import DEALT, dealt, runs_of
from overweave.ir.library_call import Side, is_permuted, sides_of
from overweave.ir.schedule import Buffer, Collective, Operation, Region
from overweave.runtime.library.library import View


class Permuted:
    """The permuted buffers of a schedule. memory: the whole tensor of a rank's instance, by buffer and rank."""

    def __init__(self, buffers: Iterable[Buffer], memory: Callable[[str, int], Tensor]) -> None:
        self._all = {buffer.name: buffer for buffer in buffers}
        self._buffers = {name: buffer for name, buffer in self._all.items() if buffer.blocks is not None}
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

    def sides(self, collective: Collective, view: View) -> tuple[list[Tensor], list[Tensor]]:
        """What a library call sends and gets, by member, or once for all: equal parts of two stretches of memory where
        blocks are permuted, else the matrices of regions."""
        if not is_permuted(collective, self._all):
            pairs = zip((collective.sources, collective.destinations), DEALT[collective.function], strict=True)
            sent, got = (
                [view(one) for (one,) in dealt(side, is_dealt, len(collective.ranks))] for side, is_dealt in pairs
            )
            return sent, got
        sides = sides_of(collective, self._all)
        assert not isinstance(sides, str), f"verify refuses it: {sides}"
        sent, got = (list(self._stretch(side, collective.rank).tensor_split(side.parts)) for side in sides)
        return sent, got

    def _stretch(self, side: Side, rank: int) -> Tensor:
        return self._memory(side.buffer, rank).view(-1)[slice(*side.span)]

    def _pieces(self, region: Region, matrix: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Each part of a region's matrix with its place in memory."""
        buffer = self._buffers[region.buffer]
        memory = self._memory(region.buffer, region.rank)
        for run in runs_of(buffer.blocks, (buffer.rows, buffer.cols), (region.rows, region.cols)):
            part = matrix[run.row : run.row + run.rows, run.col : run.col + run.cols]
            yield part, memory.as_strided((run.rows, run.cols), (run.pitch, 1), memory.storage_offset() + run.start)
