"""What stores by blocks cost a matmul, and reads through a map a norm, on one GPU.

    python -m campaigns.gpu_reorder_cost [--most-rows M]

Each matmul once as usual and once with tiles that store whole cells of a stack of blocks in the order of their waves,
by turns, in the same tiles of the Hopper kernel; then the move that norms whole rows, of rows in place and of rows that
lie in blocks. Results are compared first, bit for bit. Means over all sizes; FlashOverlap (arXiv 2504.19519), 6.6, has
1 % for the matmul and 10 % for the norm.
"""

from __future__ import annotations

import argparse
import sys

import torch

from campaigns.gpu_ranks import need_gpus
from campaigns.rates.operands import make_normal, operands, product
from campaigns.waves.in_blocks import Shape, in_place, plain_move, plan_of, restored, stored
from overweave.tuner.calibrate.rates import Matmul, medians_us, rows_of

SHAPES: tuple[Shape, ...] = (
    (128, 1024, 1024),
    (1000, 1032, 1024),
    (2048, 4096, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 2048),
    (8192, 8192, 8192),
    (16384, 8192, 8192),
    (32768, 8192, 8192),
    (32768, 8192, 32768),
)
MOST_STORE, MOST_NORM = 1.01, 1.10  # times the plain kernel's
MOST_CHECKED = 1 << 36  # multiplications whose result is compared in full


def cost_of_stores(shape: Shape) -> float:
    """Times of a matmul that stores by blocks, over those of one that does not."""
    m, n, k = shape
    a, b = operands(m, n, k)
    plan = plan_of(shape)
    ours = stored(plan, a, b)
    plain = Matmul(ours.config, rows_of(m, n, k, ours.config), a, b, torch.empty((m, n), device="cuda", dtype=a.dtype))
    if m * n * k <= MOST_CHECKED:
        plain()
        ours.matmul()
        exact = product(a, b)
        assert torch.equal(plain.out, exact), f"{shape}: the plain matmul is wrong"
        assert torch.equal(in_place(ours.matmul.out, ours.blocks, (m, n)), exact), f"{shape}: blocks are wrong"
    make_normal(a, b)
    by_blocks, in_order = medians_us([ours.matmul, plain])
    ratio = by_blocks / in_order
    print(f"{m}x{n}x{k}: {in_order:9.1f} us in place, {by_blocks:9.1f} by blocks: {ratio:.4f}", flush=True)
    return ratio


def cost_of_norm(shape: Shape) -> float:
    """Times of a norm that reads through the map, over those of one that reads in place."""
    m, n, _ = shape
    plan = plan_of(shape, has_norm=True)
    blocks = plan.schedule.buffer("staged").blocks
    assert blocks is not None
    source = torch.randn(blocks.stack, device="cuda").bfloat16()
    outs = [torch.empty((m, n), device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    mapped = restored(plan, source, blocks, outs[0])
    plain = plain_move(in_place(source, blocks, (m, n)).contiguous(), outs[1])
    mapped()
    plain()
    assert torch.allclose(outs[0].float(), outs[1].float(), rtol=2**-7, atol=1e-6), f"{shape}: the mapped norm is wrong"
    through, direct = medians_us([mapped, plain])
    print(f"{m}x{n}: {direct:9.1f} us a plain norm, {through:9.1f} through the map: {through / direct:.4f}", flush=True)
    return through / direct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-rows", type=int, default=1 << 15)
    asked = parser.parse_args()
    need_gpus()
    shapes = [shape for shape in SHAPES if shape[0] <= asked.most_rows]
    stores = sum(map(cost_of_stores, shapes)) / len(shapes)
    norms = sum(map(cost_of_norm, shapes)) / len(shapes)
    print(
        f"means: stores by blocks {stores:.4f} (at most {MOST_STORE}), norms by a map {norms:.4f} (at most {MOST_NORM})"
    )
    sys.exit(int(stores > MOST_STORE or norms > MOST_NORM))


if __name__ == "__main__":
    main()
