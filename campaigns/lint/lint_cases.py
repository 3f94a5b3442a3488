"""Every kernel of ours with every configuration it is launched in, and what each promises to the lint.

The signatures are what a launch specialises for: pointers aligned to 16 bytes, sizes divisible by 16 or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from msgspec.structs import replace

from campaigns.lint.lint_case import (
    DTYPES,
    DTYPES_OF_OPERANDS,
    OPERANDS,
    RARE_VARIANTS,
    SCALED,
    SHARES,
    SUM,
    VARIANTS,
    Case,
    Variant,
    dealt,
    descriptor_type,
    source_of,
)
from campaigns.lint.lint_gated import gated_tiles
from campaigns.lint.lint_packed import packed_cases
from campaigns.lint.lint_protocol import PROTOCOL, begin_case, stamp_case, tell_case, wait_case
from campaigns.lint.lint_skinny import skinny_cases
from campaigns.lint.lint_stored import Stored, at_no_peer, at_peers, stored_tiles
from overweave.compiler.ptx_lint.contract import Contract, Guard
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import BIAS, GATE, NO_EPILOGUE, RESIDUAL, SCALE_W, SCALE_X, Epilogue
from overweave.ir.plan import (
    MOST_WEIGHTS,
    TILE_KERNEL,
    CopyConfig,
    DataPath,
    MatmulConfig,
    ReduceConfig,
    shares_obstacle,
)
from overweave.ir.problem import Problem
from overweave.kernels.copy import copy_kernel
from overweave.kernels.hopper.matmul import matmul_hopper_kernel
from overweave.kernels.matmul import matmul_kernel
from overweave.kernels.reduction import reduction_kernel
from overweave.runtime.gpu.kernels.kernels import reduction_options
from overweave.runtime.gpu.kernels.matmul import hopper_parts
from overweave.schedules.finished import shapes_of_tiles
from overweave.schedules.methods.record import Adds
from overweave.schedules.tiles.shape import SUMS, SUMS_FINISHED, Kernel, row_shape, shapes

TILE_KERNELS: dict[Kernel, tuple[Dtype, ...]] = {"portable": tuple(DTYPES), "hopper": ("bfloat16", "float16")}
WORDS_PER_KIB = 256  # of int32
NORMED_COLS = (1024, 4096, 16384)
EPILOGUES = (
    Epilogue(bias=True, activation="silu"),
    Epilogue(bias=True),
    Epilogue(bias=True, activation="gelu_tanh", residual=True),
)
SCALES = (SCALE_X, "scales", SCALE_W)
# What a kernel that takes tiles from a table is given.
TABLE = {"table": "*i32", "claims": "*i32", "trace": "*i64", "tiles": "i32", "world_size": "i32", "n": "i32"}


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
        yield from map(stored_case, stored_tiles(kernel))
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


def stored_case(tile: Stored) -> Case:
    """A matmul whose tiles store at peers."""
    plain = matmul_case(tile.dtype, tile.config, tile.variant, tile.epilogue, addends=tile.addends)
    return at_peers(plain, tile)


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
    signature = {"operands": "*i64", "out": f"*{DTYPES_OF_OPERANDS[dtype]}", **PROTOCOL, **TABLE}
    part_n = config.block_n // config.parts
    blocks = {
        "OPERANDS": operands,
        "FIRST": told - 1,
        "TOLD": told,
        "BLOCK_M": config.block_m,
        "BLOCK_N": part_n,
        "TRACED": traced,
    }
    signature |= dict.fromkeys(epilogue.inputs, f"*{DTYPES_OF_OPERANDS[dtype]}")
    signature |= {"ready": "*i64"} if ready else {}
    blocks["READY_RANKS"] = ready
    beside = {BIAS, RESIDUAL, "norm_weight", "z", "ready"} - signature.keys()
    constexprs = blocks | dict.fromkeys(beside) | {"EPS": 0.0, "SUM_FIRST": sum_first, "EPILOGUE": epilogue.bits}
    label = f"{dtype} {operands} operands{' traced' if traced else ''}"
    label += " sum first" * sum_first + f" {epilogue}" * bool(epilogue.bits)
    label += f" {told} told" * (told > 1) + f" {ready} ready" * (ready > 0)
    label += "" if config == SUMS[0] else f" {config.block_m}x{config.block_n}"
    source = source_of(reduction_kernel, signature, constexprs, reduction_options(config, epilogue.bits), label)
    announced = [Guard("*operands", ("out", "*operands"), optional=True), *([Guard("*ready", ())] if ready else ())]
    contract = replace(_tiles(("*operands",), ()), announced=tuple(announced), releases=len(announced))
    # A second look: at all signals, where one did not come, for the first that did not.
    return Case(source, replace(contract, claims_ahead=True, looks=2))


def norm_case(dtype: Dtype, operands: int, config: ReduceConfig, has_residual: bool) -> Case:
    """The ordered reduction that ends with a norm of whole rows: it reads a residual and a weight too, and writes z."""
    plain = reduction_case(dtype, operands, False, config)
    pointer = f"*{DTYPES[dtype]}"
    read = {"norm_weight": pointer, "z": pointer} | ({"residual": pointer} if has_residual else {})
    constexprs = {name: value for name, value in plain.source.constexprs.items() if name not in read} | {"EPS": 1e-5}
    label = f"{dtype} {operands} operands {config.block_m}x{config.block_n} norm{' residual' * has_residual}"
    signature = {"operands": "*i64", "out": pointer, **PROTOCOL, **TABLE, **read}
    source = source_of(reduction_kernel, signature, constexprs, {"num_warps": config.warps}, label)
    return Case(source, plain.contract)


def add_case(dtype: Dtype, traced: bool, ragged: bool) -> Case:
    """The same pushes, which add to what peers hold."""
    source, contract = copy_case(traced, ragged)
    signature = {name: str(kind) for name, kind in source.signature.items()} | {"source": f"*{DTYPES[dtype]}"}
    constexprs = {**source.constexprs, "ADDS": True}
    label = f"adds {dtype} {source.config}"
    divisible = () if ragged else ("row_words",)
    return Case(source_of(copy_kernel, signature, constexprs, source.options, label, divisible), contract)


def copy_case(traced: bool, ragged: bool, path: DataPath = "load_store") -> Case:
    """Pushes to peers: where to, and whom to tell, stands in a table of addresses. ragged: rows of any many words."""
    config = CopyConfig(path=path)
    numbers = {name: kind for name, kind in TABLE.items() if name != "n"}
    signature = {"targets": "*i64", "source": "*i32", **PROTOCOL, **numbers, "row_words": "i32"}
    constexprs = {"BLOCK": config.block_kib * WORDS_PER_KIB, "BULK": path == "bulk", "ADDS": False, "TRACED": traced}
    label = " ".join(word for word, holds in ((path, True), ("traced", traced), ("ragged", ragged)) if holds)
    divisible = () if ragged else ("row_words",)
    source = source_of(copy_kernel, signature, constexprs, {"num_warps": config.warps}, label, divisible)
    announced = (Guard("*targets", ("*targets",), optional=True),)
    return Case(source, replace(_tiles(("source",), ()), announced=announced, claims_ahead=True))


def matmul_case(
    dtype: Dtype,
    config: MatmulConfig,
    variant: Variant,
    epilogue: Epilogue = NO_EPILOGUE,
    addends: int = 0,
    weights: int = 1,
) -> Case:
    """The matmul that `config` names. Tensor cores are promised where the dtype has them."""
    is_hopper = config.kernel == "hopper"
    block_m, part_n = hopper_parts(config) if is_hopper else (config.block_m, config.block_n)
    b_block = (part_n, config.block_k) if variant.is_transposed else (config.block_k, part_n)
    a = descriptor_type(dtype, (block_m, config.block_k), is_hopper)
    kept: Dtype = "bfloat16" if dtype == FLOAT8 else dtype
    out = {"out": f"*{DTYPES[kept]}"}
    if is_hopper:
        out = {"out": descriptor_type(kept, (block_m, part_n), True), "out_pointer": f"*{DTYPES[kept]}"}
    factors = dict.fromkeys(_names("b", 2 if epilogue.gate else weights), descriptor_type(dtype, b_block, is_hopper))
    outs = {name: kind for base, kind in out.items() for name in _names(base, weights)}
    sides = {"a_shard": a, "a_workspace": a, **factors, **outs}
    constant: dict[str, int | str | None] = {"PRECISION": {"float32": "ieee", FLOAT8: "fp8"}.get(dtype, "tf32")}
    if is_hopper:
        constant = {"STAGES": config.stages, "SPLIT_N": config.split_n, "IN_COLUMNS": config.block_m < 128}
    read = set(epilogue.inputs) - {GATE}
    extras = {name: "*fp32" if name in SCALES else f"*{DTYPES[kept]}" for name in read}
    extras |= dict.fromkeys(("scale_x", "scales"), "*fp32") if epilogue.scaling else {}
    reads = {BIAS, RESIDUAL, *SCALES}
    constant |= dict.fromkeys(reads - extras.keys()) | {"EPILOGUE": epilogue.bits}
    sums = {"total": f"*{DTYPES[kept]}", "addends": "*i64"} if addends else {}
    beside = {"total_tiles", "addend_tiles"} if is_hopper else set[str]()
    sums |= dict.fromkeys(beside if addends else (), out["out"])
    if addends > 1:
        sums.pop("addend_tiles", None)
    constant |= dict.fromkeys({"total", "addends", *beside} - sums.keys()) | {"ADDENDS": addends}
    shares = {"partials": "*fp32", "arrivals": "*i32"} if config.split_k else {}
    constant |= dict.fromkeys({"partials", "arrivals"} - shares.keys()) | {"SPLIT_K": config.split_k > 0}
    constant |= at_no_peer(config.kernel)
    columns = _names("n", weights)
    constant |= dict.fromkeys({name for base in ("b", *out, "n") for name in _names(base, MOST_WEIGHTS)})
    constant = {name: value for name, value in constant.items() if name not in {*sides, *columns}}
    constant["WEIGHTS"] = weights
    options = {"num_warps": 4} if is_hopper else {"num_warps": config.warps, "num_stages": config.stages}
    tile = f"{config.block_m}x{config.block_n}x{config.block_k} {_launch(config)}"
    added = f"{addends} addend{'s' if addends > 1 else ''}" if addends else ""
    several = f"{weights} weights" if weights > 1 else ""
    source = source_of(
        matmul_hopper_kernel if is_hopper else matmul_kernel,
        {**sides, **extras, **sums, **shares, **PROTOCOL, **TABLE, **dict.fromkeys(columns, "i32"), "k": "i32"},
        {**constant, **variant.constexprs},
        options,
        " ".join(filter(None, (f"{dtype} {tile}", str(variant), str(epilogue), added, several))),
        () if variant.ragged else (*columns, "k"),
    )
    guarded = ("a_workspace",) if variant.two_sources else ("a_shard",)
    announced = (*outs, *(name for name in sums if name.startswith("total")))
    contract = _tiles(guarded, announced, uses_tensor_cores=dtype != "float32")
    if config.split_k:
        contract = replace(contract, private=("arrivals",), counted=(SHARES,))
    contract = replace(contract, depth=0) if dtype == FLOAT8 else contract  # loads alone are ahead of a step's product
    return Case(source, _with_addends(contract, "addend_tiles" in sums) if addends else contract)


def _launch(config: MatmulConfig) -> str:
    """For labels: warps and stages, rectangles of columns, and whether its kernel knows shares along k."""
    parts = f"/{config.split_n}" if config.split_n > 1 else ""
    return f"{config.warps}w{config.stages}s{parts}" + (" along k" if config.split_k else "")


def _names(base: str, weights: int) -> list[str]:
    """What belongs to each weight: `b`, `b_1`, `b_2`."""
    return [base, *(f"{base}_{index}" for index in range(1, weights))]


def _with_addends(contract: Contract, are_loaded: bool) -> Contract:
    """One more wait, with its alarm's look, which guards what a table of addresses names, or what is loaded in bulk."""
    guarded = (*contract.guarded, Guard("signals", ("addend_tiles" if are_loaded else "*addends",), optional=True))
    return replace(contract, waits=2, looks=2, guarded=guarded)


def _tiles(guarded: tuple[str, ...], announced: tuple[str, ...], uses_tensor_cores: bool = False) -> Contract:
    """A kernel that takes tiles from a table, which says what to wait for and what to signal, if anything.

    The one look beside the wait is the alarm's, which reports what the signal says.
    """
    return Contract(
        waits=1,
        looks=1,
        releases=1,
        guarded=(Guard("signals", guarded, optional=True),),
        announced=(Guard("signals", announced, optional=True),),
        alarm=("words", "*limits"),
        claims=("claims",),
        wgmma=uses_tensor_cores,
        depth=1 if uses_tensor_cores else 0,
    )
