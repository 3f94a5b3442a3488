"""Flash-attention forward, [sequence, heads, head dim] row-major: keys and values are walked block by block."""

import triton
import triton.language as tl


@triton.jit
def attention_kernel(
    q,
    k,
    v,
    out,
    Q,
    S,
    H,
    D: tl.constexpr,
    q_start,
    scale,
    BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """softmax(q @ k.T * scale) @ v. Query i is position q_start + i of the sequence; causal: it sees none behind it."""
    # @overweave.axis Q block=BLOCK_Q
    # @overweave.axis H block=1
    # @overweave.axis S block=BLOCK_S streamed
    # @overweave.dispatch begin
    # @overweave.pid_map Q=start_q H=head
    start_q = tl.program_id(0)
    head = tl.program_id(1)
    # @overweave.dispatch end
    rows = start_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    dims = tl.arange(0, D)
    queries = tl.load(q + (rows[:, None] * H + head) * D + dims[None, :], mask=rows[:, None] < Q, other=0.0)
    peak = tl.full((BLOCK_Q,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, D), tl.float32)
    high = S
    if CAUSAL:
        high = tl.minimum(S, q_start + (start_q + 1) * BLOCK_Q)
    # @overweave.stream S
    for start in range(0, high, BLOCK_S):
        places = start + tl.arange(0, BLOCK_S)
        # @overweave.load K=k[S, H, D]
        keys = tl.load(k + (places[None, :] * H + head) * D + dims[:, None], mask=places[None, :] < S, other=0.0)
        scores = tl.dot(queries, keys) * scale
        seen = places[None, :] < S
        if CAUSAL:
            seen = seen & (places[None, :] <= q_start + rows[:, None])
        scores = tl.where(seen, scores, -1e30)
        above = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp(scores - above[:, None]), 0.0)
        shrink = tl.exp(peak - above)
        total = total * shrink + tl.sum(weights, 1)
        # @overweave.load V=v[S, H, D]
        values = tl.load(v + (places[:, None] * H + head) * D + dims[None, :], mask=places[:, None] < S, other=0.0)
        mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None])
        peak = above
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    place = out + (rows[:, None] * H + head) * D + dims[None, :]
    # @overweave.store O=out[Q, H, D]
    tl.store(place, result, mask=rows[:, None] < Q)
