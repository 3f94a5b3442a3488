"""How fast are the parts alone on one GPU? The rates that tile shapes and the machine file are drawn from.

    python -m campaigns.gpu_rates [--only MATMUL|EPILOGUES|ELEMENTS] [--portable]

Tile kernels: every tile shape of the catalog, with the last wave cut and whole, over local shapes of mlp and others,
beside the better of two cuBLAS timings of the same minute; samples of all of them are interleaved. Before that every
shape runs over ragged sizes in both layouts of `b`, on integers, whose results are compared bit for bit. The shape that
the catalog chooses is marked (campaigns/rates/gpu_tile_choice.py asks that of more matmuls). Epilogues: right, and what
they cost beside torch. Element-wise: the passes of a sum that torch runs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from msgspec.structs import replace

from campaigns.gpu_ranks import need_gpus
from overweave.ir.epilogue import Epilogue
from overweave.ir.plan import MatmulConfig, split_obstacle
from overweave.ir.problem import Problem
from overweave.ir.tile_order import TileRow
from overweave.runtime.gpu.matmul import Matmul
from overweave.runtime.library.epilogue import apply_epilogue
from overweave.schedules.catalog.catalog import build
from overweave.schedules.tiles.shape import Kernel, shapes, tile_shape

SHAPES = (
    (8192, 2752, 4096), (8192, 3584, 4096), (8192, 9216, 4608), (8192, 7392, 8192), (8192, 4096, 2752),
    (8192, 3584, 3584), (8192, 8192, 7392), (1024, 12288, 12288), (512, 7168, 8192), (8192, 4096, 1024),
    (2048, 2560, 8192), (1024, 1536, 4096),
)  # fmt: skip
RAGGED = ((1000, 264, 136), (700, 1304, 520), (129, 2744, 72), (4096, 2696, 1032))
TRIED: dict[tuple[str, int, int], dict[str, int]] = {
    ("hopper", 128, 256): {"group_m": 8},
    ("hopper", 128, 128): {"stages": 6},
}
EPILOGUE_SHAPE = (4000, 3584, 4096)
EPILOGUES = (
    Epilogue(bias=True, activation="silu"),
    Epilogue(activation="gelu"),
    Epilogue(bias=True, activation="gelu_tanh", residual=True),
)
SAMPLES = 15
ELEMENTS = (2048, 4096)
SHAPE_OPTIONS = ("block_m", "block_n", "block_k", "group_m", "stages", "warps", "split_n", "kernel")


def medians_us(calls: list[Callable[[], object]], samples: int = SAMPLES) -> list[float]:
    """The median of each call's device times, each behind a sleep that hides the host, all calls by turns.

    The table of a Matmul is rewound before its time begins: in a plan the head of the call does that.
    """
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(-2, samples):
        for index in range(len(calls)):
            place = (index + turn) % len(calls)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call = calls[place]
            torch.cuda._sleep(200_000)
            if isinstance(call, Matmul):
                call.rewind()
            begin.record()
            call.run() if isinstance(call, Matmul) else call()
            end.record()
            torch.cuda.synchronize()
            if turn >= 0:
                times[place].append(float(begin.elapsed_time(end)) * 1e3)
    return [sorted(each)[samples // 2] for each in times]


def configs(kernels: tuple[Kernel, ...]) -> tuple[MatmulConfig, ...]:
    """Every tile shape of the kernels, with the last wave cut, if it may be, and whole; and other values to try."""
    found = dict[MatmulConfig, None]()
    for config in (shape.config for kernel in kernels for shape in shapes("bfloat16", kernel)):
        changed = [replace(config, split_n=1)]
        changed += [replace(config, **TRIED.get((config.kernel, config.block_m, config.block_n), {}))]
        found |= dict.fromkeys([config, *(one for one in changed if not split_obstacle(one))])
    return tuple(found)


def rows_of(m: int, n: int, k: int, config: MatmulConfig, split_k: int = 1) -> tuple[TileRow, ...]:
    """The table of an ordinary matmul: the gather's of a group of one. split_k: the option of that name."""
    problem = Problem(operator="all_gather_matmul", m=m, n=n, k=k, world_size=1, dtype="bfloat16")
    options: dict[str, int | str] = {name: getattr(config, name) for name in SHAPE_OPTIONS}
    options["split_k"] = split_k
    options["sms"] = torch.cuda.get_device_properties(0).multi_processor_count
    return build("all_gather_matmul.push", problem, options).tile_orders[0].rows


def made(config: MatmulConfig, a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor, split_k: int = 1) -> Matmul:
    """The matmul in a tile shape, run once and compared. Raises AssertionError for a wrong result."""
    (m, k), n = a.shape, b.shape[1]
    out = torch.full((m, n), float("nan"), device="cuda", dtype=a.dtype)
    matmul = Matmul(config, rows_of(m, n, k, config, split_k), a, b, out)
    matmul()
    assert torch.equal(out, exact), f"{m}x{n}x{k} {config} split_k={split_k}: wrong"
    return matmul


def operands(m: int, n: int, k: int, is_transposed: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers from -1 to 1, whose sums are exact in any order."""
    a = torch.randint(-1, 2, (m, k), device="cuda", dtype=torch.int8).bfloat16()
    if is_transposed:
        return a, torch.randint(-1, 2, (n, k), device="cuda", dtype=torch.int8).bfloat16().t()
    return a, torch.randint(-1, 2, (k, n), device="cuda", dtype=torch.int8).bfloat16()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of such operands, rounded once."""
    return (a.float() @ b.float()).to(a.dtype)


def make_normal(*operands: torch.Tensor) -> None:
    """Instead of integers, on which a GPU needs less power, and so is faster."""
    for operand in operands:
        operand.normal_()


def check_kernels(kernels: tuple[Kernel, ...]) -> None:
    """Ragged sizes, both layouts. Raises AssertionError for a wrong result."""
    for shape in RAGGED:
        for is_transposed in (False, True):
            a, b = operands(*shape, is_transposed)
            exact = product(a, b)
            for config in configs(kernels):
                made(config, a, b, exact)
    print(f"{len(RAGGED)} ragged shapes, both layouts, {len(configs(kernels))} tile shapes: bit-equal")


def compare_kernels(m: int, n: int, k: int, kernels: tuple[Kernel, ...]) -> None:
    """Prints every tile shape's time, best first, and its share of cuBLAS. Raises AssertionError for a wrong result."""
    a, b = operands(m, n, k)
    wanted = product(a, b)
    tried = configs(kernels)
    matmuls = [made(config, a, b, wanted) for config in tried]
    make_normal(a, b)
    library: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=wanted)] * 2
    first, second, *times = medians_us([*library, *matmuls])
    library_us = min(first, second)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = tile_shape((m,), n, sms, shapes("bfloat16", "hopper"))
    print(f"{m}x{n}x{k}: cuBLAS {library_us:.1f} us, {2 * m * n * k / library_us / 1e6:.0f} TFLOP/s")
    for time_us, config in sorted(zip(times, tried, strict=True), key=lambda pair: pair[0]):
        cut = sum(1 for row in rows_of(m, n, k, config) if row.width)
        name = f"{config.kernel} {config.block_m}x{config.block_n}x{config.block_k} stages {config.stages}"
        mark = " <- chosen" if config == chosen else ""
        said = f"group {config.group_m} narrow {cut:4d} of split {config.split_n}"
        print(f"    {name:32s} {said} {time_us:9.1f} us {library_us / time_us:6.3f}{mark}")


def check_epilogues() -> None:
    """Prints what epilogues cost. Raises AssertionError for a result further from fp32 than two roundings."""
    m, n, k = EPILOGUE_SHAPE
    a, b = operands(m, n, k)
    make_normal(a, b)
    plain = torch.mm(a, b)
    extras = {"bias": torch.randn(n, device="cuda").bfloat16(), "residual": torch.randn(m, n, device="cuda").bfloat16()}
    kernels: tuple[Kernel, ...] = ("hopper", "portable")
    for kernel, epilogue in itertools.product(kernels, EPILOGUES):
        config = shapes("bfloat16", kernel, epilogue)[0].config
        read = {name: extras[name] for name in epilogue.inputs}
        out, by_torch = torch.full_like(plain, float("nan")), torch.empty_like(plain)
        matmul = Matmul(config, rows_of(m, n, k, config), a, b, out, epilogue, read)
        matmul()
        exact = torch.mm(a.float(), b.float())
        apply_epilogue(exact, slice(0, m), epilogue, {name: tensor.float() for name, tensor in read.items()})
        error = float(((out.float() - exact).abs() / (exact.abs() + 1)).max())
        assert error < 2**-7, f"{config.kernel} {epilogue}: error {error}"

        def separate(epilogue: Epilogue = epilogue, y: torch.Tensor = by_torch) -> None:
            torch.mm(a, b, out=y)
            apply_epilogue(y, slice(0, m), epilogue, extras)

        fused_us, torch_us, plain_us = medians_us([matmul, separate, lambda: torch.mm(a, b, out=plain)])
        said = f"{config.kernel} {epilogue}: fused {fused_us:.1f} us, torch {torch_us:.1f} us"
        print(f"{said}, cuBLAS without {plain_us:.1f} us, error {error:.1e}")


def element_wise() -> None:
    """Prints what the passes of a library sum move: bytes read and written over time."""
    parts = [torch.randn(ELEMENTS, device="cuda").bfloat16() for _ in range(8)]
    total, turn = parts[0].float(), iter(range(1 << 30))
    passes: dict[str, tuple[Callable[[], object], int]] = {
        "fp32 += bf16": (lambda: total.add_(parts[next(turn) % 8]), 10),
        "bf16 to fp32": (lambda: parts[next(turn) % 8].to(torch.float32, copy=True), 6),
        "fp32 to bf16": (lambda: parts[next(turn) % 8].copy_(total), 6),
    }
    for (name, (_, element_bytes)), time_us in zip(
        passes.items(), medians_us([call for call, _ in passes.values()]), strict=True
    ):
        print(f"{name}: {time_us:.1f} us, {total.numel() * element_bytes / time_us / 1e3:.0f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m campaigns.gpu_rates")
    parser.add_argument("--only", choices=("MATMUL", "EPILOGUES", "ELEMENTS"), help="one part")
    parser.add_argument("--portable", action="store_true", help="the portable kernel too, not only the hopper one")
    asked = parser.parse_args()
    need_gpus()
    kernels: tuple[Kernel, ...] = ("hopper", "portable") if asked.portable else ("hopper",)
    if asked.only in (None, "EPILOGUES"):
        check_epilogues()
    if asked.only in (None, "MATMUL"):
        check_kernels(kernels)
        for shape in SHAPES:
            compare_kernels(*shape, kernels)
    if asked.only in (None, "ELEMENTS"):
        element_wise()


if __name__ == "__main__":
    main()
