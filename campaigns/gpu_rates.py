"""How fast are the parts alone on one GPU? The rates that tile shapes and the machine file are drawn from.

    python -m campaigns.gpu_rates

Tile kernels: every tile shape of the catalog over local shapes of mlp and two others, beside the better of two cuBLAS
timings of the same minute, checked against its result. Element-wise: the passes of a sum that torch runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from overweave.ir.plan import MULTIPLY, NO_SIGNAL, OWN_SHARD, MatmulConfig, TileRow
from overweave.runtime.matmul import Matmul
from overweave.schedules.tile_order import swizzled
from overweave.schedules.tile_shape import shapes

SHAPES = (
    (8192, 2752, 4096), (8192, 3584, 4096), (8192, 9216, 4608), (8192, 7392, 8192), (8192, 4096, 2752),
    (8192, 3584, 3584), (8192, 8192, 7392), (1024, 12288, 12288),
)  # fmt: skip
SAMPLES = 15
ELEMENTS = (2048, 4096)


def median_us(call: Callable[[], object]) -> float:
    """The median of device times, each behind a sleep that hides the host."""
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(SAMPLES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3)
    return sorted(times)[SAMPLES // 2]


def plain_rows(m: int, n: int, config: MatmulConfig) -> Iterator[TileRow]:
    """The table of an ordinary matmul: no waits, no signals."""
    for row, col in swizzled((0, m), (0, n), config.block_m, config.block_n, config.group_m):
        end = min(row + config.block_m, m)
        yield TileRow(MULTIPLY, row, end, col, OWN_SHARD, row, 0, 0, 0, NO_SIGNAL, 0)


def compare_kernels(m: int, n: int, k: int) -> None:
    """Prints every tile shape's time, best first, and its share of cuBLAS. Raises AssertionError for a wrong result."""
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(n, k, device="cuda").bfloat16().t()
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    wanted = a @ b
    library_us = min(median_us(lambda: torch.mm(a, b, out=wanted)) for _ in range(2))
    print(f"{m}x{n}x{k}: cuBLAS {library_us:.1f} us, {2 * m * n * k / library_us / 1e6:.0f} TFLOP/s")
    found = []
    for config in (shape.config for kernel in ("hopper", "portable") for shape in shapes("bfloat16", kernel)):
        matmul = Matmul(config, tuple(plain_rows(m, n, config)), a, b, out.fill_(float("nan")))
        matmul()
        error = float((out.float() - wanted.float()).norm() / wanted.float().norm())
        assert error < 1e-2, f"{config}: error {error}"
        found.append((median_us(matmul), config))
    for time_us, config in sorted(found, key=lambda pair: pair[0]):
        name = f"{config.kernel} {config.block_m}x{config.block_n}x{config.block_k} stages {config.stages}"
        print(f"    {name:32s} warps {config.warps} {time_us:9.1f} us {library_us / time_us:6.3f}")


def element_wise() -> None:
    """Prints what the passes of a library sum move: bytes read and written over time."""
    parts = [torch.randn(ELEMENTS, device="cuda").bfloat16() for _ in range(8)]
    total, turn = parts[0].float(), iter(range(1 << 30))
    passes: dict[str, tuple[Callable[[], object], int]] = {
        "fp32 += bf16": (lambda: total.add_(parts[next(turn) % 8]), 10),
        "bf16 to fp32": (lambda: parts[next(turn) % 8].to(torch.float32, copy=True), 6),
        "fp32 to bf16": (lambda: parts[next(turn) % 8].copy_(total), 6),
    }
    for name, (call, element_bytes) in passes.items():
        time_us = median_us(call)
        print(f"{name}: {time_us:.1f} us, {total.numel() * element_bytes / time_us / 1e3:.0f} GB/s")


def main() -> None:
    for shape in SHAPES:
        compare_kernels(*shape)
    element_wise()


if __name__ == "__main__":
    main()
