"""Attention over gathered keys and values: TileLink, figure 6. A copy engine gathers, the kernel begins at home."""

import torch
import triton
import triton.language as tl

import overweave as ow
from overweave.lang.primitives import consumer_rows, consumer_tile_wait, voided


@triton.jit
def attention_kernel(
    gathered,
    keys,
    values,
    q,
    out,
    Q,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """softmax(q @ k.T * scale) @ v for this rank's queries, `[Q, H, D]`, over the keys of all ranks, `[S, H, D]`."""
    ranks: tl.constexpr = gathered.layout.world_size
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, D)
    queries = tl.load(q + (rows[:, None] * H + head) * D + dims[None, :], mask=(rows < Q)[:, None], other=0.0)
    peak = tl.full((BLOCK_Q,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, D), tl.float32)
    verdict = 1
    for turn in range(ranks):
        shard = (gathered.rank + turn) % ranks
        verdict = verdict * consumer_tile_wait(gathered, shard)
        low, high = consumer_rows(gathered, shard)
        for start in range(low, high, BLOCK_S):
            places = start + tl.arange(0, BLOCK_S)
            seen = (places < high)[None, :]
            k = tl.load(keys.own + (places[None, :] * H + head) * D + dims[:, None], mask=seen, other=0.0)
            scores = tl.where(seen, tl.dot(queries, k) * scale, -1e30)
            above = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.where(seen, tl.exp(scores - above[:, None]), 0.0)
            shrink = tl.exp(peak - above)
            total = total * shrink + tl.sum(weights, 1)
            v = tl.load(
                values.own + (places[:, None] * H + head) * D + dims[None, :], mask=(places < high)[:, None], other=0.0
            )
            mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None])
            peak = above
    result = voided(mixed / total[:, None], verdict).to(out.dtype.element_ty)
    tl.store(out + (rows[:, None] * H + head) * D + dims[None, :], result, mask=(rows < Q)[:, None])


class GatheredAttention:
    """Attention of this rank's queries over the keys and values of all ranks. Built collectively.

    sizes: sequence, heads, head dimension.
    """

    def __init__(self, sizes: tuple[int, int, int], dtype: torch.dtype):
        length, self.heads, self.dim = sizes
        ranks, width = torch.distributed.get_world_size(), self.heads * self.dim
        self.shards = ow.Tiles(length, width, -(-length // ranks), width, ranks)  # a chunk is a shard
        channel, buffer = ow.TileChannel(self.shards), ow.SymmetricBuffer(length, width, dtype)
        self.program = ow.TileProgram({"keys": buffer, "values": buffer}, {"ready": channel, "gathered": channel})

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: tuple[int, int] = (128, 64), **options: int
    ) -> torch.Tensor:
        """q, k, v: this rank's rows, `[length / ranks, heads, dim]`."""
        out, shards = torch.empty_like(q), self.shards
        with self.program.call() as call:
            own = slice(*shards.rows_of(call.rank))
            for name, shard in (("keys", k), ("values", v)):
                call.rank_copy_data(shard.flatten(1), call.part(name)[own])
            call.rank_notify("ready", call.rank, "broadcast")
            call.rank_notify("gathered", call.rank, call.rank)
            copies = call.queue("gather")
            for peer in ((call.rank + turn) % call.world_size for turn in range(1, call.world_size)):
                rows = slice(*shards.rows_of(peer))
                copies.rank_wait("ready", peer)
                for name in ("keys", "values"):
                    copies.rank_copy_data(call.part(name, peer)[rows], call.part(name)[rows])
                copies.rank_notify("gathered", peer, call.rank)
            call.launch(
                attention_kernel,
                (triton.cdiv(len(q), blocks[0]), self.heads),
                *(call.channel("gathered"), call.tensor("keys"), call.tensor("values"), q, out),
                *(len(q), self.dim**-0.5, self.heads, self.dim, *blocks),
                **options,
            )
        return out
