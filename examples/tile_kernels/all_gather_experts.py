"""All-gather + experts in one kernel: TileLink, figure 5. Some programs pull tokens, the others multiply.

Which tokens go to which expert is known on the device alone, so the tiles of experts, and the counters that they wait
for, stand in tables that the device fills: a dynamic mapping.
"""

import torch
import triton
import triton.language as tl

import overweave as ow
from overweave.lang.primitives import (
    LOCAL,
    P2P,
    consumer_column,
    consumer_rows,
    consumer_tile_wait,
    producer_column,
    producer_rank,
    producer_rows,
    producer_tile_notify,
    tile_pull_data,
    voided,
)


@triton.jit
def gather_experts_kernel(
    ready, gathered, shards, tokens, order, experts, w, out, H, D, TOPK, BLOCK_K: tl.constexpr, PULL: tl.constexpr
):
    """out[pair] = token of the pair @ w[its expert]. The first PULL programs gather `tokens` from the ranks' shards."""
    made: tl.constexpr = gathered.layout.tiles
    read: tl.constexpr = gathered.layout.consumed
    if tl.program_id(0) < PULL:
        for index in range(tl.program_id(0), made.count, PULL):
            tile = (index + gathered.rank * made.per_shard) % made.count
            verdict = consumer_tile_wait(ready, producer_rank(gathered, tile))
            data = tile_pull_data(gathered, shards, tile, P2P)
            low, high = producer_rows(gathered, tile)
            rows = low + tl.arange(0, made.tile_rows)
            cols = producer_column(gathered, tile) + tl.arange(0, made.tile_cols)
            inside = (rows < high)[:, None] & (cols < H)[None, :]
            tl.store(tokens + rows[:, None] * H + cols[None, :], voided(data, verdict), mask=inside)
            producer_tile_notify(gathered, tile, LOCAL, verdict)
    else:
        tile = tl.program_id(0) - PULL
        low, high = consumer_rows(gathered, tile)
        if low < high:
            verdict = consumer_tile_wait(gathered, tile)
            places = low + tl.arange(0, read.tile_rows)
            pairs = tl.load(order + places, mask=places < high, other=0)
            w += tl.load(experts + tile // read.across).to(tl.int64) * H * D
            cols = consumer_column(gathered, tile) + tl.arange(0, read.tile_cols)
            depth = tl.arange(0, BLOCK_K)
            product = tl.zeros((read.tile_rows, read.tile_cols), tl.float32)
            for k in range(0, H, BLOCK_K):
                left = tl.load(
                    tokens + (pairs // TOPK)[:, None] * H + (k + depth)[None, :],
                    mask=(places < high)[:, None] & (k + depth < H)[None, :],
                )
                right = tl.load(
                    w + (k + depth)[:, None] * D + cols[None, :], mask=(k + depth < H)[:, None] & (cols < D)[None, :]
                )
                product = tl.dot(left, right, product)
            inside = (places < high)[:, None] & (cols < D)[None, :]
            result = voided(product, verdict).to(out.dtype.element_ty)
            tl.store(out + pairs.to(tl.int64)[:, None] * D + cols[None, :], result, mask=inside)


class AllGatherExperts:
    """Every token of every rank times the weights of its experts, `[m, h]` and `[e, h, d]` -> `[m * topk, d]`.

    block: tile of the experts' matmuls; moved: tile of the gather; pull: programs that run it, fewer than SMs.
    Built collectively.
    """

    def __init__(self, sizes: tuple[int, int, int, int, int], dtype: torch.dtype, block: int, moved: tuple[int, int]):
        m, self.topk, self.experts, h, d = sizes
        ranks = torch.distributed.get_world_size()
        made = ow.Tiles(m, h, *moved, ranks)
        # As many tiles as there can be: each expert's last one may be short.
        self.most = m * self.topk // block + self.experts
        read = ow.Tiles(self.most * block, d, block, block)
        self.gathered = ow.TileChannel(made, read, channels=made.down)
        self.program = ow.TileProgram(
            buffers={"shards": ow.SymmetricBuffer(made.shard_rows, h, dtype, is_shard=True)},
            channels={"ready": ow.TileChannel(ow.Tiles(ranks, 1, 1, 1, ranks)), "gathered": self.gathered},
        )

    def route(self, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """On the device, without a look by the host: pairs sorted by expert, the expert of each tile, and its mapping.

        topk_ids: `[m, topk]`. A pair is a token and one of its experts: the number `token * topk + choice`.
        """
        made, block = self.gathered.tiles, self.gathered.consumed.tile_rows
        chosen = topk_ids.flatten()
        order = chosen.argsort(stable=True)
        counts = (chosen[None, :] == torch.arange(self.experts, device=chosen.device)[:, None]).sum(1)
        ends, tiles = counts.cumsum(0), ((counts + block - 1) // block).cumsum(0)
        tile = torch.arange(self.most, device=chosen.device)
        expert = torch.searchsorted(tiles, tile, right=True).clamp(max=self.experts - 1)
        first = tiles[expert] - (counts[expert] + block - 1) // block
        low = torch.minimum(ends[expert] - counts[expert] + (tile - first) * block, ends[expert])
        high = torch.minimum(low + block, ends[expert])
        # Within an expert pairs stand in the order of tokens: the first and the last one say which counters.
        is_some = low < high
        rows = [order[at.clamp(0, len(order) - 1)] // self.topk for at in (low, high - 1)]
        shards = [row // made.shard_rows for row in rows]
        inside = [row % made.shard_rows // made.tile_rows // self.gathered.down for row in rows]
        begin, end = (shard * self.gathered.channels + part for shard, part in zip(shards, inside, strict=True))
        mapping = torch.stack([low, high, shards[0], begin, torch.where(is_some, end + 1, begin)], 1)
        return order.int(), expert.int(), mapping.int().contiguous()

    def __call__(
        self, tokens: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, block_k: int = 64, pull: int = 20,
        **options: int,
    ) -> torch.Tensor:  # fmt: skip
        """tokens: this rank's shard `[m / ranks, h]`. topk_ids: of all tokens. w: `[e, h, d]`."""
        made, read = self.gathered.tiles, self.gathered.consumed
        order, experts, mapping = self.route(topk_ids)
        out = tokens.new_empty(made.rows * self.topk, read.cols)
        whole = tokens.new_empty(made.rows, made.cols)
        with self.program.call() as call:
            call.rank_copy_data(tokens, call.part("shards")[: len(tokens)])
            call.rank_notify("ready", call.rank, "broadcast")
            call.launch(
                gather_experts_kernel,
                pull + read.count,
                *(call.channel("ready"), call.channel("gathered", consumer_table=mapping), call.tensor("shards")),
                *(whole, order, experts, w, out, made.cols, read.cols, self.topk, block_k, pull),
                **options,
            )
        return out
