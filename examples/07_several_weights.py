"""Several weights over one gather: query, key and value of an attention layer; and SwiGLU, gate and up in one call.

    python examples/07_several_weights.py

Two emulated ranks hold half of the tokens each and, as in tensor parallelism, their own heads' columns of every weight.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import overweave as ow
from overweave.runtime.host.processes import run_ranks

TOKENS, WIDTH = 96, 64
COLUMNS = (64, 16, 16)  # of query, key and value on each rank: grouped heads share keys and values


def layer() -> str:
    """One rank's part: one call, one gather, three products; then one call, one gather, one gated product."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    x_shard = torch.randn(TOKENS // dist.get_world_size(), WIDTH, generator=generator)
    w_q, w_k, w_v = (torch.randn(WIDTH, columns, generator=generator) for columns in COLUMNS)

    query, key, value = ow.all_gather_matmul(x_shard, [w_q, w_k, w_v])

    one_by_one = [ow.all_gather_matmul(x_shard, w) for w in (w_q, w_k, w_v)]
    difference = max(float((a - b).abs().max()) for a, b in zip((query, key, value), one_by_one, strict=True))
    w_up, w_gate = (torch.randn(WIDTH, COLUMNS[0], generator=generator) for _ in range(2))
    hidden = ow.all_gather_matmul(x_shard, w_up, gate=w_gate, activation="silu")

    up, gate = ow.all_gather_matmul(x_shard, [w_up, w_gate])
    plain = torch.nn.functional.silu(gate) * up
    assert torch.allclose(hidden, plain)

    shapes = ", ".join(str(list(y.shape)) for y in (query, key, value))
    return f"query, key, value {shapes}; off three calls by {difference:.0e}; SwiGLU {list(hidden.shape)}"


def main() -> None:
    """Prints what each rank saw, and the plan that an H200 would take."""
    for rank, told in enumerate(run_ranks(layer, 2)):
        print(f"rank {rank}: {told}")
    print(ow.explain("all_gather_matmul", m=8192, n=(1024, 256, 256), k=4096, world_size=4))


if __name__ == "__main__":
    main()
