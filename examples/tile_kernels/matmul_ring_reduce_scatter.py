"""Matmul + ring reduce-scatter in one kernel: TileLink, figure 4. Some programs multiply, others add and hand on."""

import torch
import triton
import triton.language as tl

import overweave as ow
from overweave.lang.primitives import (
    LOCAL,
    P2P,
    consumer_tile_wait,
    peer_tile_notify,
    peer_tile_wait,
    producer_column,
    producer_rows,
    producer_tile_notify,
    tile_push_data,
    voided,
)


@triton.jit
def matmul_ring_kernel(
    partials, ring, arriving, a, b, partial, out, K, N: tl.constexpr, BLOCK_K: tl.constexpr, RING: tl.constexpr
):
    """out = this rank's rows of the sum over ranks of a @ b. The first RING programs pass sums to the rank below."""
    made: tl.constexpr = partials.layout.tiles
    moved: tl.constexpr = ring.layout.tiles
    ranks: tl.constexpr = ring.layout.world_size
    above = (ring.rank + 1) % ranks
    below = (ring.rank + ranks - 1) % ranks
    if tl.program_id(0) < RING:
        for index in range(tl.program_id(0), moved.count, RING):
            stage = index // moved.per_shard
            shard = (ring.rank + stage + 1) % ranks
            tile = shard * moved.per_shard + index % moved.per_shard
            verdict = consumer_tile_wait(partials, tile)
            low, high = producer_rows(ring, tile)
            rows = low + tl.arange(0, moved.tile_rows)
            cols = producer_column(ring, tile) + tl.arange(0, moved.tile_cols)
            inside = (rows < high)[:, None] & (cols < N)[None, :]
            place = rows[:, None] * N + cols[None, :]
            total = tl.load(partial + place, mask=inside, other=0.0).to(tl.float32)
            if stage > 0:
                verdict = verdict * peer_tile_wait(ring, tile, above)
                total += tl.load(arriving.own + place, mask=inside, other=0.0).to(tl.float32)
            total = voided(total, verdict)
            if stage < ranks - 1:
                tile_push_data(ring, arriving, tile, total, P2P, below)
                peer_tile_notify(ring, tile, below, verdict)
            else:
                own = place - ring.rank * moved.shard_rows * N
                tl.store(out + own, total.to(out.dtype.element_ty), mask=inside)
    else:
        # In the order in which the ring asks for shards: the one of the rank above first, the own one last.
        tile = (tl.program_id(0) - RING + above * made.per_shard) % made.count
        low, high = producer_rows(partials, tile)
        rows = low + tl.arange(0, made.tile_rows)
        cols = producer_column(partials, tile) + tl.arange(0, made.tile_cols)
        depth = tl.arange(0, BLOCK_K)
        product = tl.zeros((made.tile_rows, made.tile_cols), tl.float32)
        for k in range(0, K, BLOCK_K):
            left = tl.load(
                a + rows[:, None] * K + (k + depth)[None, :], mask=(rows < high)[:, None] & (k + depth < K)[None, :]
            )
            right = tl.load(
                b + (k + depth)[:, None] * N + cols[None, :], mask=(k + depth < K)[:, None] & (cols < N)[None, :]
            )
            product = tl.dot(left, right, product)
        inside = (rows < high)[:, None] & (cols < N)[None, :]
        tl.store(partial + rows[:, None] * N + cols[None, :], product.to(partial.dtype.element_ty), mask=inside)
        producer_tile_notify(partials, tile, LOCAL)


class MatmulReduceScatter:
    """`reduce_scatter(a @ b)` of `[m, k]` and `[k, n]` on every rank. Built collectively.

    block: tile of the matmul; moved: tile of the ring, of any size; ring: programs that run it, fewer than SMs.
    """

    def __init__(self, m: int, n: int, dtype: torch.dtype, block: tuple[int, int], moved: tuple[int, int], ring: int):
        ranks = torch.distributed.get_world_size()
        tiles, steps = (ow.Tiles(m, n, *size, ranks) for size in (block, moved))
        self.tiles, self.ring = tiles, ring
        self.program = ow.TileProgram(
            buffers={"arriving": ow.SymmetricBuffer(m, n, dtype)},
            channels={
                "partials": ow.TileChannel(tiles, steps, channels=tiles.down),
                "ring": ow.TileChannel(steps, has_peers=True),
            },
        )

    def __call__(self, a: torch.Tensor, b: torch.Tensor, block_k: int = 64, **options: int) -> torch.Tensor:
        """`[rows of this rank, n]`. Partial sums travel in the dtype of `a`, added in fp32."""
        tiles = self.tiles
        low, high = (min(tiles.rows, (self.program.rank + end) * tiles.shard_rows) for end in (0, 1))
        out, partial = a.new_empty(high - low, tiles.cols), a.new_empty(tiles.rows, tiles.cols)
        with self.program.call() as call:
            call.launch(
                matmul_ring_kernel,
                self.ring + tiles.count,
                *(call.channel("partials"), call.channel("ring"), call.tensor("arriving")),
                *(a, b, partial, out, a.shape[1], tiles.cols, block_k, self.ring),
                **options,
            )
        return out
