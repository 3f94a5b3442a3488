"""Every kernel of ours with every configuration it is launched in, and what each promises to the lint.

The signatures are what a launch specialises for: pointers aligned to 16 bytes, sizes divisible by 16 or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from msgspec.structs import replace

from campaigns.lint.lint_case import (
    DTYPES,
    OPERANDS,
    RARE_VARIANTS,
    SCALED,
    SUM,
    VARIANTS,
    Case,
    dealt,
)
from campaigns.lint.lint_gated import gated_tiles
from campaigns.lint.lint_matmul import matmul_case
from campaigns.lint.lint_packed import packed_cases
from campaigns.lint.lint_protocol import begin_case, stamp_case, tell_case, wait_case
from campaigns.lint.lint_skinny import skinny_cases
from campaigns.lint.lint_stored import stored_tiles
from overweave.compiler.aot import Source, source_of_launch
from overweave.compiler.ptx_lint.contract import Contract, Guard
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import NO_EPILOGUE, Epilogue
from overweave.ir.plan import (
    TILE_KERNEL,
    CopyConfig,
    DataPath,
    MatmulConfig,
    ReduceConfig,
    shares_obstacle,
)
from overweave.ir.problem import Problem
from overweave.kernels.arguments import AfterSums, SignalWords, TileQueue
from overweave.kernels.copy import copy_kernel
from overweave.kernels.reduction import reduction_kernel
from overweave.runtime.gpu.kernels.kernels import WORDS_PER_KIB, reduction_options
from overweave.runtime.gpu.kernels.tile_call import Summing, copy_arguments, reduction_arguments
from overweave.schedules.finished import shapes_of_tiles
from overweave.schedules.methods.record import Adds
from overweave.schedules.tiles.shape import SUMS, SUMS_FINISHED, Kernel, row_shape, shapes

TILE_KERNELS: dict[Kernel, tuple[Dtype, ...]] = {"portable": tuple(DTYPES), "hopper": ("bfloat16", "float16")}
NORMED_COLS = (1024, 4096, 16384)
EPILOGUES = (
    Epilogue(bias=True, activation="silu"),
    Epilogue(bias=True),
    Epilogue(bias=True, activation="gelu_tanh", residual=True),
)
# What every kernel that takes tiles from a table is given.
ADDRESSES = torch.empty(16, dtype=torch.int64)
_WORDS = torch.empty(64, dtype=torch.int32)
TILES = TileQueue(_WORDS, _WORDS, ADDRESSES, 7), SignalWords(_WORDS, _WORDS, ADDRESSES, 4)


SUMMED = "matmul_reduce_scatter"
FINISHED = Epilogue(bias=True, activation="silu", residual=True)


def cases() -> Iterator[Case]:
    """All of them."""
    yield begin_case()
    yield tell_case()
    yield wait_case()
    yield stamp_case()
    for dtype, operands, traced in product(DTYPES, OPERANDS, (False, True)):
        yield reduction_case(dtype, operands, traced)
    for dtype, traced in product(DTYPES, (False, True)):
        yield reduction_case(dtype, 2, traced, sum_first=True)
        yield from (add_case(dtype, traced, ragged) for ragged in (False, True))
    for config in SUMS[1:]:
        yield reduction_case("bfloat16", 4, False, config)
    for ranks in OPERANDS:
        yield reduction_case("bfloat16", ranks, ranks == 2, told=ranks, ready=ranks)
    for config, operands in product((SUMS_FINISHED, *SUMS[1:]), OPERANDS):
        yield reduction_case("bfloat16", operands, False, config, epilogue=FINISHED)
    for config, epilogue in product((SUMS_FINISHED, *SUMS[1:]), EPILOGUES):
        yield reduction_case("bfloat16", 4, False, config, epilogue=epilogue)
    yield reduction_case("float32", 2, True, SUMS_FINISHED, sum_first=True, epilogue=FINISHED)
    for cols in NORMED_COLS:
        yield norm_case("bfloat16", 4, row_shape(1 << 20, cols, 132), True)
    yield norm_case("float32", 8, row_shape(1 << 20, 4096, 132), True)
    yield norm_case("bfloat16", 8, row_shape(1, 512, 132), False)
    for traced, ragged in product((False, True), (False, True)):
        yield from (copy_case(traced, ragged, path) for path in ("load_store", "bulk"))
    yield from packed_cases()
    yield from skinny_cases()
    for kernel, dtypes in TILE_KERNELS.items():
        for dtype in dtypes:
            for shape, variant in product(shapes(dtype, kernel), VARIANTS):
                yield matmul_case(dtype, shape.config, variant)
        for variant in RARE_VARIANTS:
            yield matmul_case("bfloat16", MatmulConfig(kernel=kernel), variant)
        for epilogue in EPILOGUES:
            for shape in shapes("bfloat16", kernel, epilogue)[:2]:
                yield matmul_case("bfloat16", shape.config, VARIANTS[-1], epilogue)
        yield from sum_cases(kernel)
        yield from finished_cases(kernel)
        yield from (matmul_case(*tile) for tile in stored_tiles(kernel))
        yield from several_cases(kernel)
        yield from (matmul_case(*tile) for tile in gated_tiles(kernel))
    yield from split_cases("hopper")
    yield from scaled_cases("portable")
    yield from scaled_cases("hopper")
    yield reduction_case(FLOAT8, 2, False)


def scaled_cases(kernel: Kernel) -> Iterator[Case]:
    """Operands in fp8, results in bf16: scaled by rows in every shape, by one scale each, with all that may follow."""
    by_rows, by_tensor = Epilogue(scaling="rows"), Epilogue(scaling="tensor", bias=True, activation="gelu_tanh")
    for shape in shapes(FLOAT8, kernel, by_rows):
        yield matmul_case(FLOAT8, shape.config, SCALED, by_rows)
    config = shapes(FLOAT8, kernel, by_tensor)[0].config
    yield matmul_case(FLOAT8, config, SCALED, by_tensor)
    yield matmul_case(FLOAT8, config, SCALED._replace(traced=True), replace(by_tensor, scaling="rows", residual=True))
    for shape, weights in zip(shapes(FLOAT8, kernel, by_rows), (3, 2, 3, 2), strict=False):
        yield matmul_case(FLOAT8, shape.config, SCALED, replace(by_rows, bias=True), weights=weights)
    own = SCALED._replace(two_sources=False)
    for shape in shapes(FLOAT8, kernel, by_rows):
        yield matmul_case(FLOAT8, shape.config, own, by_rows, addends=3)
    yield matmul_case(FLOAT8, config, own, Epilogue(scaling="tensor"), addends=1)
    yield matmul_case(FLOAT8, config, own._replace(traced=True), by_rows, addends=1)


def sum_cases(kernel: Kernel) -> Iterator[Case]:
    """Tiles that add what peers sent: of three peers and of one in every shape, with a trace, ragged.

    The portable kernel spills a little where rows are ragged: 80 bytes, in the epilogue.
    """
    for shape in shapes("bfloat16", kernel):
        yield matmul_case("bfloat16", shape.config, SUM, addends=3)
        yield matmul_case("bfloat16", shape.config, SUM, addends=1)
    config = shapes("bfloat16", kernel)[0].config
    yield matmul_case("float16", config, SUM, addends=1)
    for addends in (1, 3):
        yield matmul_case("bfloat16", config, SUM._replace(traced=True), addends=addends)
    if kernel == "hopper":
        for addends in (1, 3):
            yield matmul_case("bfloat16", config, SUM._replace(ragged=True, is_transposed=True), addends=addends)


def finished_cases(kernel: Kernel) -> Iterator[Case]:
    """Tiles that finish the sums that they make: of three peers and of one in every shape, with a trace, of fp8."""
    scaled = replace(FINISHED, scaling="rows")
    for ranks in (4, 2):
        addends, size = ranks - 1, Problem(operator=SUMMED, m=1024, n=1024, k=1024, world_size=ranks, dtype="bfloat16")
        ours = replace(size, epilogue=FINISHED)
        for shape in shapes_of_tiles(ours, kernel, Adds(TILE_KERNEL), "epilogue"):
            yield matmul_case("bfloat16", shape.config, SUM, FINISHED, addends=addends)
        config = shapes_of_tiles(replace(ours, dtype=FLOAT8, epilogue=scaled), kernel, Adds(TILE_KERNEL), "epilogue")[
            0
        ].config
        yield matmul_case(FLOAT8, config, SCALED._replace(two_sources=False), scaled, addends=addends)
    config = shapes("bfloat16", kernel, FINISHED)[0].config
    yield matmul_case("bfloat16", config, SUM._replace(traced=True), Epilogue(bias=True), addends=1)


def several_cases(kernel: Kernel) -> Iterator[Case]:
    """Tiles of two weights in every shape, of three, traced and ragged; with what an epilogue reads for each column."""
    for shape in shapes("bfloat16", kernel):
        yield matmul_case("bfloat16", shape.config, VARIANTS[-1], weights=2)
    config = shapes("bfloat16", kernel)[0].config
    for variant in (VARIANTS[-1], *RARE_VARIANTS):
        yield matmul_case("bfloat16", config, variant, weights=3)
    biased = Epilogue(bias=True)
    for shape in shapes("bfloat16", kernel, biased)[:2]:
        yield matmul_case("bfloat16", shape.config, VARIANTS[-1], biased, weights=2)
    for shape, epilogue in product(shapes("bfloat16", kernel, biased, 3)[:2], EPILOGUES[:2]):
        yield matmul_case("bfloat16", shape.config, VARIANTS[-1], epilogue, weights=3)


def split_cases(kernel: Kernel) -> Iterator[Case]:
    """Tiles dealt out along k: in every shape that can be; of one, all that may come with it.

    With a residual, tiles of 128 x 256 spill a little: 8 bytes, two looks per tile.
    """
    plain = [config for config in map(dealt, shapes("bfloat16", kernel)) if not shares_obstacle(config)]
    for config in plain:
        yield matmul_case("bfloat16", config, VARIANTS[-1])
    for variant in (VARIANTS[0], *RARE_VARIANTS):
        yield matmul_case("bfloat16", plain[0], variant)
    yield matmul_case("bfloat16", plain[0], SUM, addends=3)
    yield matmul_case("bfloat16", plain[0], VARIANTS[-1], weights=2)
    for epilogue in (*EPILOGUES, Epilogue(activation="silu", gate=True)):
        known = (
            one for one in shapes("bfloat16", kernel, epilogue) if one.config.block_n < 256 or not epilogue.residual
        )
        yield matmul_case("bfloat16", dealt(next(known)), VARIANTS[-1], epilogue)
    by_rows = Epilogue(scaling="rows")
    yield matmul_case(FLOAT8, dealt(shapes(FLOAT8, kernel, by_rows)[0]), SCALED, by_rows)


def reduction_case(
    dtype: Dtype,
    operands: int,
    traced: bool,
    config: ReduceConfig = SUMS[0],
    sum_first: bool = False,
    epilogue: Epilogue = NO_EPILOGUE,
    told: int = 1,
    ready: int = 0,
) -> Case:
    """The ordered reduction, of operands of one dtype or first of a sum that is kept in fp32. What it reads and writes,
    and whose signals it adds to, may lie where a table says. told: how many ranks. ready: how many it tells at first.
    """
    label = f"{dtype} {operands} operands{' traced' if traced else ''}"
    label += " sum first" * sum_first + f" {epilogue}" * bool(epilogue.bits)
    label += f" {told} told" * (told > 1) + f" {ready} ready" * (ready > 0)
    label += "" if config == SUMS[0] else f" {config.block_m}x{config.block_n}"
    out = torch.empty(16, dtype=getattr(torch, dtype))
    after = AfterSums(**dict.fromkeys(epilogue.inputs, out))
    words = torch.empty(ready, dtype=torch.int64) if ready else None
    how = Summing(traced, after, 0.0, sum_first, epilogue.bits, words)
    source = _reduction(config, out, (operands, told - 1, told), how, label)
    announced = [Guard("*operands", ("out", "*operands"), optional=True), *([Guard("*ready", ())] if ready else ())]
    contract = replace(_tiles(("*operands",)), announced=tuple(announced), releases=len(announced))
    # A second look: at all signals, where one did not come, for the first that did not.
    return Case(source, replace(contract, claims_ahead=True, looks=2))


def _reduction(
    config: ReduceConfig, out: torch.Tensor, widths: tuple[int, int, int], how: Summing, label: str
) -> Source:
    given = reduction_arguments(config, [ADDRESSES, out, *TILES, 1001], widths, how)
    return source_of_launch(reduction_kernel, given, reduction_options(config, how.epilogue), label)


def norm_case(dtype: Dtype, operands: int, config: ReduceConfig, has_residual: bool) -> Case:
    """The ordered reduction that ends with a norm of whole rows: it reads a residual and a weight too, and writes z."""
    out = torch.empty(16, dtype=getattr(torch, dtype))
    after = AfterSums(residual=out if has_residual else None, norm_weight=out, z=out)
    label = f"{dtype} {operands} operands {config.block_m}x{config.block_n} norm{' residual' * has_residual}"
    source = _reduction(config, out, (operands, 0, 1), Summing(after=after, eps=1e-5), label)
    return Case(source, reduction_case(dtype, operands, False, config).contract)


def add_case(dtype: Dtype, traced: bool, ragged: bool) -> Case:
    """The same pushes, which add to what peers hold."""
    return copy_case(traced, ragged, adds=dtype)


def copy_case(traced: bool, ragged: bool, path: DataPath = "load_store", adds: Dtype | None = None) -> Case:
    """Pushes to peers: where to, and whom to tell, stands in a table of addresses. ragged: rows of any many words."""
    config = CopyConfig(path=path)
    words = (f"adds {adds}", adds is not None), (path, True), ("traced", traced), ("ragged", ragged)
    label = " ".join(word for word, holds in words if holds)
    source = torch.empty(16, dtype=getattr(torch, adds or "int32"))
    arguments = [ADDRESSES, source, *TILES, 1001 if ragged else 1024]
    given = copy_arguments(arguments, config.block_kib * WORDS_PER_KIB, path == "bulk", adds is not None, traced)
    announced = (Guard("*targets", ("*targets",), optional=True),)
    contract = replace(_tiles(("source",)), announced=announced, claims_ahead=True)
    return Case(source_of_launch(copy_kernel, given, {"num_warps": config.warps}, label), contract)


def _tiles(guarded: tuple[str, ...]) -> Contract:
    """A kernel that takes tiles from a table, which says what to wait for and what to signal, if anything.

    The one look beside the wait is the alarm's, which reports what the signal says.
    """
    return Contract(
        waits=1,
        looks=1,
        releases=1,
        guarded=(Guard("protocol.signals", guarded, optional=True),),
        alarm=("protocol.words", "*protocol.limits"),
        claims=("queue.claims",),
    )
