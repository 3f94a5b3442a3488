"""Every kernel of ours with every configuration it is launched in, and what each promises to the lint.

The signatures are what a launch specialises for: pointers aligned to 16 bytes, sizes divisible by 16 or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from campaigns.lint.lint_case import ADDRESSES, DTYPES, OPERANDS, SOME, Case, case_of, tiles_of
from campaigns.lint.lint_matmul import matmul_case
from campaigns.lint.lint_packed import begin_case, packed_cases, skinny_cases, stamp_case, tell_case, wait_case
from campaigns.lint.lint_rows import rows_cases
from campaigns.lint.lint_tiles import EPILOGUES, FINISHED, tiles
from overweave.ir.dtype import FLOAT8, Dtype
from overweave.ir.epilogue import NO_EPILOGUE, Applied, Epilogue, Norm
from overweave.ir.plan import CopyConfig, DataPath, ReduceConfig
from overweave.kernels.arguments import SumEpilogueArgs
from overweave.kernels.epilogue import epilogue_code, operands_of, rows_code
from overweave.kernels.quantise import quantise_rows_kernel
from overweave.runtime.kernel_calls.call import KernelCall
from overweave.runtime.kernel_calls.sums_and_copies import Pushes, ReductionCall, copy_call, reduction_call
from overweave.schedules.tiles.shape import SUMS, SUMS_FINISHED, row_shape
from tools.ptx_lint.contract import Guard

NORMED_COLS = (1024, 4096, 16384)
NORM = rows_code(Norm(eps=1e-5))

BLOCK_COLS = (256, 192, 160)  # of tiles that store block by block
OUT, PLACES = torch.empty(16, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int32)


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
        yield reduction_case("bfloat16", ranks, ranks == 2, told=ranks)
    for config, operands in product((SUMS_FINISHED, *SUMS[1:]), OPERANDS):
        yield reduction_case("bfloat16", operands, False, config, epilogue=FINISHED)
    for config, epilogue in product((SUMS_FINISHED, *SUMS[1:]), EPILOGUES):
        yield reduction_case("bfloat16", 4, False, config, epilogue=epilogue)
    yield reduction_case("float32", 2, True, SUMS_FINISHED, sum_first=True, epilogue=FINISHED)
    for cols in NORMED_COLS:
        yield norm_case("bfloat16", 4, row_shape(1 << 20, cols, 132), True)
    yield norm_case("bfloat16", 4, row_shape(1 << 20, 1024, 132), True, first=2)
    yield norm_case("float32", 8, row_shape(1 << 20, 4096, 132), True)
    yield norm_case("bfloat16", 8, row_shape(1, 512, 132), False)
    yield from mapped_cases()
    for traced, ragged in product((False, True), (False, True)):
        yield from (copy_case(traced, ragged, path) for path in ("load_store", "bulk"))
    yield from packed_cases()
    yield from skinny_cases()
    yield from (matmul_case(*tile) for tile in tiles())
    yield reduction_case(FLOAT8, 2, False)
    yield from rows_cases()
    yield from (quantise_case(dtype, cols) for dtype, cols in product(DTYPES, (1024, SOME)))


def reduction_case(
    dtype: Dtype,
    operands: int,
    traced: bool,
    config: ReduceConfig = SUMS[0],
    sum_first: bool = False,
    epilogue: Epilogue = NO_EPILOGUE,
    told: int = 1,
) -> Case:
    """The ordered reduction, of operands of one dtype or first of a sum that is kept in fp32. What it reads and writes,
    and whose signals it adds to, may lie where a table says. told: how many ranks.
    """
    label = f"{dtype} {operands} operands{' traced' if traced else ''}"
    label += " sum first" * sum_first + f" {epilogue}" * bool(epilogue.steps)
    label += f" {told} told" * (told > 1)
    label += "" if config == SUMS[0] else f" {config.block_m}x{config.block_n}"
    out = torch.empty(16, dtype=getattr(torch, dtype))
    after, code = (
        SumEpilogueArgs(inputs=operands_of(epilogue, dict.fromkeys(epilogue.inputs, out))),
        epilogue_code(epilogue),
    )
    sums = ReductionCall(ADDRESSES, (operands, told - 1, told), out, SOME, after, 0, sum_first, code)
    return _sums_case(reduction_call(config, tiles_of(traced), sums), label)


def _sums_case(call: KernelCall, label: str) -> Case:
    """Two looks: at all signals, where one did not come, for the first that did not, and the alarm's."""
    announced = (Guard("*operands", ("out", "*operands"), optional=True),)
    return case_of(call, label, **_tiles("*operands", looks=2), announced=announced, claims_ahead=True)


def rows_case(operands: int, config: ReduceConfig, how: Applied) -> Case:
    """The ordered reduction of numbers in bf16 that ends with a registered form of whole rows."""
    made = [torch.empty(16, dtype=getattr(torch, each.dtype)) for each in how.form.makes]
    after = SumEpilogueArgs(None, (OUT,) * len(how.inputs) or None, OUT, *made[1:])
    sums = ReductionCall(ADDRESSES, (operands, 0, 1), made[0], SOME, after, rows_code(how))
    label = f"bfloat16 {operands} operands {config.block_m}x{config.block_n} {how}"
    return _sums_case(reduction_call(config, tiles_of(False), sums), label)


def norm_case(dtype: Dtype, operands: int, config: ReduceConfig, has_residual: bool, first: int = 0) -> Case:
    """The ordered reduction that ends with a norm of whole rows: it reads a residual and a weight too, and writes z.
    first: the operand that is read first, of those that lie at peers.
    """
    out = torch.empty(16, dtype=getattr(torch, dtype))
    after = SumEpilogueArgs(out if has_residual else None, (out,), out)
    label = f"{dtype} {operands} operands {config.block_m}x{config.block_n} norm{' residual' * has_residual}"
    label += f" from {first} on" * (first > 0)
    call = reduction_call(
        config, tiles_of(False), ReductionCall(ADDRESSES, (operands, first, 1), out, SOME, after, NORM)
    )
    return _sums_case(call, label)


def mapped_cases() -> Iterator[Case]:
    """What moves sums out of permuted blocks: as they are, finished, and normed; of tiles of every width."""
    for block_n in BLOCK_COLS:
        for config, epilogue in ((SUMS[0], NO_EPILOGUE), (SUMS_FINISHED, FINISHED)):
            after = SumEpilogueArgs(inputs=operands_of(epilogue, dict.fromkeys(epilogue.inputs, OUT)))
            sums = ReductionCall(ADDRESSES, (1, 0, 1), OUT, SOME, after, 0, False, epilogue_code(epilogue))
            sums = sums._replace(cells=PLACES, cell=(128, block_n))
            yield _mapped(config, sums, str(epilogue))
        for cols in NORMED_COLS:
            config = row_shape(1 << 20, cols, 132)
            after = SumEpilogueArgs(OUT, (OUT,), OUT)
            sums = ReductionCall(ADDRESSES, (1, 0, 1), OUT, SOME, after, NORM, False, 0, PLACES, (128, block_n))
            yield _mapped(config, sums, "norm")


def _mapped(config: ReduceConfig, sums: ReductionCall, what: str) -> Case:
    label = f"bfloat16 by a map of {sums.cell[0]}x{sums.cell[1]} {config.block_m}x{config.block_n} {what}"
    return _sums_case(reduction_call(config, tiles_of(False), sums), label)


def quantise_case(dtype: Dtype, cols: int) -> Case:
    """Rows in fp8: no signals, and nothing but loads and stores."""
    x, values = torch.empty(16, dtype=getattr(torch, dtype)), torch.empty(16, dtype=getattr(torch, FLOAT8))
    arguments = [x, values, torch.empty(16), SOME, cols, cols, 448.0, 2048]
    return case_of(KernelCall(quantise_rows_kernel, arguments, {"num_warps": 4}, 1), f"{dtype} {cols} columns")


def add_case(dtype: Dtype, traced: bool, ragged: bool) -> Case:
    """The same pushes, which add to what peers hold."""
    return copy_case(traced, ragged, adds=dtype)


def copy_case(traced: bool, ragged: bool, path: DataPath = "load_store", adds: Dtype | None = None) -> Case:
    """Pushes to peers: where to, and whom to tell, stands in a table of addresses. ragged: rows of any many words."""
    config = CopyConfig(path=path)
    words = (f"adds {adds}", adds is not None), (path, True), ("traced", traced), ("ragged", ragged)
    label = " ".join(word for word, holds in words if holds)
    source = torch.empty(16, dtype=getattr(torch, adds or "int32"))
    pushes = Pushes(ADDRESSES, source, SOME if ragged else 1024, adds is not None)
    announced = (Guard("*targets", ("*targets",), optional=True),)
    call = copy_call(config, tiles_of(traced), pushes)
    return case_of(call, label, **_tiles("source"), announced=announced, claims_ahead=True)


def _tiles(guarded: str, looks: int = 1) -> dict[str, Any]:
    """What a kernel promises whose table says what to wait for, and what to signal, if anything.

    The one look beside the wait is the alarm's, which reports what the signal says.
    """
    guards = (Guard("protocol.signals", (guarded,), optional=True),)
    return {"waits": 1, "looks": looks, "releases": 1, "guarded": guards}
