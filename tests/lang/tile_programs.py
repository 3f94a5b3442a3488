"""Two small all-gathers as tile programs: by copies beside a kernel, and by the kernel's own tiles."""

from __future__ import annotations

from typing import Any

import torch

from overweave.lang.mapping import TileChannel, Tiles
from overweave.ops.author.tile_program import SymmetricBuffer, TileCall
from overweave.runtime.handwritten import Declared, Reads, TileEffect
from tests.lang import primitive_kernels as kernels

ROWS, COLS = 22, 12


class Gathered:
    """Each rank pushes its shard by copy engine; a kernel's tiles wait for the shards that they touch."""

    def __init__(self, ranks: int) -> None:
        self.tiles = Tiles(ROWS, COLS, -(-ROWS // ranks), 16, ranks)
        self.consumed = Tiles(ROWS, COLS, 4, 16, ranks)
        channel = TileChannel(self.tiles, self.consumed)
        self.declared = Declared({"whole": SymmetricBuffer(ROWS, COLS, torch.float32)}, {"gathered": channel})

    def write(self, call: TileCall, x: Any, out: Any) -> None:
        """x: this rank's rows; out: all rows."""
        own = slice(*self.tiles.rows_of(call.rank))
        call.rank_copy_data(x, call.part("whole")[own])
        call.rank_notify("gathered", call.rank, call.rank)
        copies = call.queue("copies")
        for peer in range(call.world_size):
            if peer != call.rank:
                copies.rank_copy_data(x, call.part("whole", peer)[own])
                self.tell(copies, peer)
        arguments = (call.channel("gathered"), call.tensor("whole"), out, COLS)
        call.launch(kernels.arrived_kernel, self.consumed.count, *arguments, tile_effects=self.effects())

    def tell(self, copies: Any, peer: int) -> None:
        """Says on a peer that this rank's shard is there."""
        copies.rank_notify("gathered", copies._call.rank, peer)

    def effects(self) -> tuple[TileEffect, ...]:
        """What the kernel's tiles do."""
        return (TileEffect(self.consumed, "out", "x", (Reads("whole", "x", "gathered"),)),)


class Pushed:
    """The kernel's first program pushes this rank's tiles to all; the others wait for a tile each and copy it."""

    def __init__(self, ranks: int) -> None:
        self.tiles, self.consumed = Tiles(ROWS, COLS, 4, 8, ranks), Tiles(ROWS, COLS, 8, 4, ranks)
        channel = TileChannel(self.tiles, self.consumed, channels=2)
        self.declared = Declared({"whole": SymmetricBuffer(ROWS, COLS, torch.float32)}, {"gathered": channel})

    def write(self, call: TileCall, x: Any, out: Any) -> None:
        """x: this rank's rows; out: all rows. On the device x is a matrix of all rows, of which those are set."""
        arguments = (call.channel("gathered"), call.tensor("whole"), x, out, ROWS, COLS, kernels.NOTHING.value)
        grid = 1 + self.consumed.count
        call.launch(kernels.gather_kernel, grid, *arguments, tile_effects=self.effects())

    def read(self) -> Reads:
        """What a consumer's tile reads."""
        return Reads("whole", "x", "gathered")

    def effects(self) -> tuple[TileEffect, ...]:
        """Of the tiles that are pushed, and of those that are copied."""
        pushed = TileEffect(self.tiles, "whole", "x", (Reads("x", "x"),), own=True, tells="gathered", mode="broadcast")
        return pushed, TileEffect(self.consumed, "out", "x", (self.read(),))
