"""True kernels on CPU ranks, gathered and summed, against the kernel alone on one.

Run by tests/compiler/test_authored.py in a process of its own:
where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from overweave.compiler.emit.fuse import kernel_of  # noqa: E402
from overweave.compiler.frontend.source.kernel import AnnotatedKernel  # noqa: E402
from overweave.memory.group import Group, resolve  # noqa: E402
from overweave.ops.author.arguments import kernel_location  # noqa: E402
from overweave.ops.author.compile import FusedKernel  # noqa: E402
from overweave.ops.author.trial import CHECKED  # noqa: E402
from overweave.runtime.backends import load  # noqa: E402
from tests.compiler.untruths import true_forms, true_matmuls, true_places, true_public, true_rows  # noqa: E402
from tests.compiler.untruths.trials import try_in_copies  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

load("host author")
try_in_copies()
GATHERS = ("all_gather.push pieces=2", "all_gather.collective")  # a tile tells one wait for rows of two chunks
SUM = "all_reduce.two_shot"


class Case(NamedTuple):
    """A call. grid: of the kernel alone. gathered: what ranks hold shards of; summed: what all of them get the sum of.

    written: all that is written. dtypes: of what is not fp32.
    """

    kernel: Any
    numbers: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    grid: tuple[int, ...]
    gathered: tuple[str, ...]
    summed: str
    written: tuple[str, ...]
    dtypes: Mapping[str, torch.dtype] = {}


def over(extent: int, block: int = 16) -> int:
    return -(-extent // block)


def matmul(m: int, n: int, k: int) -> Case:
    numbers = {"M": m, "N": n, "K": k, "BM": 16, "BN": 16, "BK": 16}
    shapes = {"x_ptr": (m, k), "w_ptr": (k, n), "y_ptr": (m, n)}
    return Case(true_places.plain_matmul, numbers, shapes, (over(m) * over(n),), ("x_ptr",), "y_ptr", ("y_ptr",))


def moved(kernel: Any, x: tuple[int, ...], y: tuple[int, ...], grid: tuple[int, ...], **numbers: int) -> Case:
    return Case(kernel, numbers, {"x_ptr": x, "y_ptr": y}, grid, ("x_ptr",), "y_ptr", ("y_ptr",))


def wrapped(m: int, n: int) -> Case:
    return moved(true_places.wrapped, (m, n), (m, n), (over(m), over(n)), M=m, N=n, BM=16, BN=16)


def even_and_odd(n: int) -> Case:
    return moved(true_places.even_and_odd, (9, n), (9, n), (9,), M=9, N=n, H=16)


def quotients(m: int, n: int) -> Case:
    return moved(true_places.quotients, (m, n), (m, n // 2), (over(m),), M=m, N=n, BM=16, H=32)


def strides(m: int) -> Case:
    numbers = {"M": m, "sxm": 16, "sxd": 1, "sym": 16, "syd": 1, "D": 16, "BM": 16}
    return moved(true_places.strides, (m, 16), (m, 16), (over(m),), **numbers)


def one_head(m: int, h: int, p: int) -> Case:
    return moved(true_places.one_head, (m, h, 16), (m, p, 16), (over(m), p), M=m, H=h, P=p, BM=16, D=16)


def constants(m: int, n: int) -> Case:
    return moved(true_places.constants, (m, n), (m, n), (over(m, 8), over(n)), M=m, N=n)


def from_right(n: int) -> Case:
    return moved(true_places.from_right, (44, n), (44,), (3,), M=44, N=n, BM=16, BN=16)


def slabs(m: int, n: int, k: int, split: int) -> Case:
    block = {"BM": 16, "BN": 16, "BK": 16, "SPLIT": split}
    strided = {"sam": k, "sak": 1, "sbk": n, "sbn": 1, "scs": m * n, "scm": n, "scn": 1}
    shapes = {"a_ptr": (m, k), "b_ptr": (k, n), "c_ptr": (split, m, n)}
    numbers = {"M": m, "N": n, "K": k, **strided, **block}
    return Case(true_places.slabs, numbers, shapes, (over(m) * over(n), split), ("a_ptr",), "c_ptr", ("c_ptr",))


def split_decode(s: int, h: int) -> Case:
    shapes = {"q_ptr": (h, 16), "k_ptr": (s, h, 16), "v_ptr": (s, h, 16)}
    shapes |= {"o_ptr": (over(s), h, 16), "l_ptr": (over(s), h)}
    numbers = {"S": s, "H": h, "scale": 0.25, "D": 16, "BS": 16}
    return Case(true_public.split_decode, numbers, shapes, (h, over(s)), ("k_ptr",), "o_ptr", ("o_ptr", "l_ptr"))


def norm_backward(m: int) -> Case:
    shapes = {"dy_ptr": (m, 40), "x_ptr": (m, 40), "w_ptr": (40,), "dx_ptr": (m, 40), "dw_ptr": (over(m), 40)}
    numbers = {"M": m, "N": 40, "BM": 16, "BN": 64}
    kernel = true_public.norm_backward
    return Case(kernel, numbers, shapes, (over(m),), ("dy_ptr", "x_ptr"), "dw_ptr", ("dx_ptr", "dw_ptr"))


def int4_matmul(m: int, gathered: tuple[str, ...]) -> Case:
    n, k = 40, 64
    shapes = {"x_ptr": (m, k), "q_ptr": (k // 8, n), "s_ptr": (k // 16, n), "y_ptr": (m, n)}
    strided = {"sxm": k, "sxk": 1, "sqk": n, "sqn": 1, "ssg": n, "ssn": 1, "sym": n, "syn": 1}
    numbers = {"M": m, "N": n, "K": k, **strided, "G": 16, "BM": 16, "BN": 16, "BK": 16}
    grid, dtypes = (over(m) * over(n),), {"q_ptr": torch.int32}
    return Case(true_public.int4_matmul, numbers, shapes, grid, gathered, "y_ptr", ("y_ptr",), dtypes)


def int8_matmul(m: int, gathered: tuple[str, ...]) -> Case:
    n, k = 40, 64
    shapes = {"a_ptr": (m, k), "b_ptr": (k, n), "s_ptr": (m,), "c_ptr": (m, n)}
    numbers = {"M": m, "N": n, "K": k, "BM": 16, "BN": 16, "BK": 32}
    grid, dtypes = (over(m) * over(n),), {"a_ptr": torch.int8, "b_ptr": torch.int8}
    return Case(true_public.int8_matmul, numbers, shapes, grid, gathered, "c_ptr", ("c_ptr",), dtypes)


def flash(z: int, h: int, n: int) -> Case:
    strided = [h * n * 16, n * 16, 16, 1]
    letters = {"q": "zhmk", "k": "zhnk", "v": "zhnk", "o": "zhmn"}
    named = {f"s{t}{a}": each for t, axes in letters.items() for a, each in zip(axes, strided, strict=True)}
    numbers = {**named, "Z": z, "H": h, "N_CTX": n, "scale": 0.25, "D": 16, "BM": 16, "BN": 16}
    shapes = dict.fromkeys(("Q", "K", "V", "Out"), (z * h, n, 16))
    return Case(true_public.flash, numbers, shapes, (over(n), z * h), ("Q",), "Out", ("Out",))


def grouped(t: int, rows: int) -> Case:
    shapes = {"x_ptr": (t, 40), "w_ptr": (over(t, rows), 40, 24), "y_ptr": (t, 24)}
    numbers = {"T": t, "R": rows, "N": 24, "K": 40, "BM": 16, "BN": 16, "BK": 16}
    return Case(true_matmuls.grouped_matmul, numbers, shapes, (over(t) * 2,), ("x_ptr",), "y_ptr", ("y_ptr",))


def geglu(m: int) -> Case:
    shapes = {"a_ptr": (m, 48), "w_ptr": (48, 80), "c_ptr": (m, 40)}
    strided = {"stride_am": 48, "stride_wk": 80, "stride_cm": 40}
    numbers = {"M": m, "N": 40, "K": 48, **strided, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2}
    return Case(true_matmuls.geglu_matmul, numbers, shapes, (over(m) * 3,), ("a_ptr",), "c_ptr", ("c_ptr",))


def rope(t: int, h: int) -> Case:
    shapes = {"x_ptr": (t, 40), "w_ptr": (40, h * 32), "cos_ptr": (t, 16), "sin_ptr": (t, 16), "q_ptr": (t, h, 32)}
    numbers = {"T": t, "H": h, "K": 40, "BT": 16, "BK": 16, "HALF": 16}
    return Case(true_matmuls.rope_matmul, numbers, shapes, (h, over(t)), ("x_ptr",), "q_ptr", ("q_ptr",))


def fp8_blocks(m: int, gathered: tuple[str, ...]) -> Case:
    n, k = 40, 80
    shapes = {"A": (m, k), "B": (n, k), "C": (m, n), "As": (m, 3), "Bs": (2, 3)}
    strided = {"stride_am": k, "stride_bn": k, "stride_cm": n, "stride_asm": 3, "stride_bsn": 3}
    numbers = {"M": m, "N": n, "K": k, "group_n": 32, "group_k": 32, **strided, "BM": 16, "BN": 16, "BK": 32}
    dtypes = {"A": torch.float8_e4m3fn, "B": torch.float8_e4m3fn}
    return Case(true_matmuls.fp8_blocks_matmul, numbers, shapes, (over(m) * 3,), gathered, "C", ("C",), dtypes)


def transposed(m: int, gathered: tuple[str, ...]) -> Case:
    shapes = {"x_ptr": (m, 40), "w_ptr": (56, 40), "y_ptr": (m, 56)}
    numbers = {"M": m, "N": 56, "K": 40, "BM": 16, "BN": 16, "BK": 16, "GROUP": 2}
    return Case(true_matmuls.transposed_persistent, numbers, shapes, (3,), gathered, "y_ptr", ("y_ptr",))


def batched(b: int, m: int, gathered: tuple[str, ...]) -> Case:
    n, k = 24, 40
    shapes = {"a_ptr": (b, k, m), "b_ptr": (b, k, n), "c_ptr": (b, m, n)}
    strided = {"sab": k * m, "sak": m, "sam": 1, "sbb": k * n, "sbk": n, "sbn": 1, "scb": m * n, "scm": n, "scn": 1}
    numbers = {"B": b, "M": m, "N": n, "K": k, **strided, "BM": 16, "BN": 16, "BK": 16}
    grid = over(m), over(n), b
    return Case(true_matmuls.batched_transposed, numbers, shapes, grid, gathered, "c_ptr", ("c_ptr",))


def conv1d(t: int) -> Case:
    shapes = {"x_ptr": (t, 24), "w_ptr": (4, 24, 40), "y_ptr": (t, 40)}
    numbers = {"T": t, "C": 24, "N": 40, "TAPS": 4, "BT": 16, "BC": 16, "BN": 16}
    return Case(true_matmuls.conv1d_matmul, numbers, shapes, (over(t), 3), ("x_ptr",), "y_ptr", ("y_ptr",))


def awq(m: int, gathered: tuple[str, ...]) -> Case:
    n, k, dtypes = 40, 64, {"q_ptr": torch.int32, "z_ptr": torch.int32}
    shapes = {"a_ptr": (m, k), "q_ptr": (k, n // 8), "z_ptr": (k // 16, n // 8), "s_ptr": (k // 16, n), "c_ptr": (m, n)}
    numbers = {"M": m, "N": n, "K": k, "G": 16, "BM": 16, "BN": 16, "BK": 16}
    return Case(true_matmuls.awq_matmul, numbers, shapes, (over(m) * 3,), gathered, "c_ptr", ("c_ptr",), dtypes)


def column_softmax(m: int) -> Case:
    return moved(true_rows.column_softmax, (m, 40), (m, 40), (3,), M=m, N=40, BM=16, BN=16)


def dropout_add(m: int) -> Case:
    shapes, numbers = dict.fromkeys(("x_ptr", "r_ptr", "y_ptr"), (m, 40)), {"M": m, "N": 40, "BM": 16, "BN": 16}
    grid, random = (3, over(m)), {"p": 0.5, "seed": 7}
    return Case(true_rows.dropout_add, numbers | random, shapes, grid, ("x_ptr", "r_ptr"), "y_ptr", ("y_ptr",))


def entropy_parts(m: int) -> Case:
    shapes = {"logits_ptr": (m, 40), "labels_ptr": (m,), "lse_ptr": (m, 3), "loss_ptr": (m, 3)}
    numbers, written = {"M": m, "V": 40, "stride": 40, "BV": 16}, ("lse_ptr", "loss_ptr")
    return Case(
        true_rows.entropy_parts,
        numbers,
        shapes,
        (m, 3),
        ("logits_ptr",),
        "lse_ptr",
        written,
        {"labels_ptr": torch.int8},
    )


def norm_with_parts(m: int) -> Case:
    shapes = {"X": (m, 40), "W": (40,), "B": (40,), "Y": (m, 40), "Mean": (m,), "Rstd": (m,), "Part": (over(m), 40)}
    numbers, written = {"M": m, "N": 40, "eps": 1e-3, "stride": 40, "ROWS": 16, "BLOCK": 64}, tuple(shapes)[3:]
    return Case(true_rows.norm_with_parts, numbers, shapes, (over(m),), ("X",), "Part", written)


def sum_of_parts(g: int) -> Case:
    shapes = {"dw_ptr": (g, 40), "db_ptr": (g, 40), "out_w_ptr": (40,), "out_b_ptr": (40,)}
    numbers, written = {"G": g, "N": 40, "BG": 4, "BN": 16}, ("out_w_ptr", "out_b_ptr")
    return Case(true_rows.sum_of_parts, numbers, shapes, (3,), ("dw_ptr", "db_ptr"), "out_w_ptr", written)


def combined_parts(s: int, h: int) -> Case:
    shapes, numbers = {"o_ptr": (s, h, 16), "l_ptr": (s, h), "y_ptr": (h, 16)}, {"S": s, "H": h, "D": 16}
    return Case(true_rows.combined_parts, numbers, shapes, (h,), ("o_ptr", "l_ptr"), "y_ptr", ("y_ptr",))


def rms_backward(m: int) -> Case:
    shapes = {"dy_ptr": (m, 40), "x_ptr": (m, 40), "w_ptr": (40,), "rstd_ptr": (m,), "dx_ptr": (m, 40)}
    shapes |= {"dw_ptr": (over(m), 40)}
    numbers, written = {"M": m, "N": 40, "stride": 40, "ROWS": 16, "BLOCK": 64}, ("dx_ptr", "dw_ptr")
    return Case(true_forms.rms_backward, numbers, shapes, (over(m),), ("dy_ptr", "x_ptr"), "dw_ptr", written)


def grouped_decode(s: int, queries: int, keys: int) -> Case:
    shapes = {"q_ptr": (queries, 16), "k_ptr": (s, keys, 16), "v_ptr": (s, keys, 16), "o_ptr": (queries, 16)}
    numbers = {"S": s, "HQ": queries, "HK": keys, "scale": 0.25, "D": 16, "BS": 16}
    return Case(true_forms.grouped_decode, numbers, shapes, (queries,), ("k_ptr", "v_ptr"), "o_ptr", ("o_ptr",))


def counted_up(m: int, n: int, k: int, gathered: tuple[str, ...]) -> Case:
    shapes = {"a_ptr": (m, k), "b_ptr": (k, n), "c_ptr": (m, n)}
    numbers, grid = {"M": m, "N": n, "K": k, "BM": 16, "BN": 16, "BK": 16}, (over(m) * over(n),)
    return Case(true_forms.counted_up_matmul, numbers, shapes, grid, gathered, "c_ptr", ("c_ptr",))


def int8_pointers(m: int, gathered: tuple[str, ...]) -> Case:
    shapes = {"x_ptr": (m, 48), "w_ptr": (48, 40), "s_ptr": (40,), "y_ptr": (m, 40)}
    numbers, kernel = {"M": m, "N": 40, "K": 48, "BM": 16, "BN": 16, "BK": 16}, true_forms.int8_pointers_matmul
    dtypes = {"w_ptr": torch.int8}
    return Case(kernel, numbers, shapes, (over(m) * 3,), gathered, "y_ptr", ("y_ptr",), dtypes)


PLACES = [
    *(matmul(*sizes) for sizes in ((1, 40, 48), (44, 1, 48), (44, 40, 1), (1, 1, 1), (40, 40, 40))),
    *(wrapped(*sizes) for sizes in ((40, 40), (1, 40), (40, 1))),
    *map(even_and_odd, (32, 31, 20)),
    *(quotients(*sizes) for sizes in ((44, 40), (1, 40), (44, 2), (44, 4))),
    moved(true_places.halves, (9, 16), (9, 16), (9,), T=9, D=16, HALF=8),
    *map(strides, (44, 1)),
    *(one_head(*sizes) for sizes in ((44, 1, 2), (1, 1, 2), (33, 2, 4))),
    constants(44, 40),
    *map(from_right, (40, 48)),
    moved(true_places.masks, (44, 40), (44, 40), (3,), M=44, N=40, BM=16, BN=16),
    *(slabs(*sizes) for sizes in ((44, 40, 96, 3), (1, 40, 96, 2), (40, 40, 40, 2))),
]
PUBLIC = [
    *(split_decode(*sizes) for sizes in ((72, 2), (64, 1), (5, 2))),
    *map(norm_backward, (72, 3)),
    *(int4_matmul(m, moved) for m, moved in ((44, ("x_ptr",)), (1, ("x_ptr",)), (44, ("q_ptr", "s_ptr")))),
    *(int8_matmul(44, moved) for moved in (("a_ptr",), ("b_ptr",), ("a_ptr", "s_ptr"))),
    *(flash(*sizes) for sizes in ((1, 4, 40), (2, 2, 32), (1, 1, 17))),
]
FURTHER = [
    *(grouped(*sizes) for sizes in ((96, 32), (40, 16))),
    *map(geglu, (44, 1)),
    rope(44, 3),
    *(fp8_blocks(44, moved) for moved in (("A",), ("A", "As"))),
    *(transposed(44, moved) for moved in (("x_ptr",), ("w_ptr",), ("x_ptr", "w_ptr"))),
    *(batched(*sizes) for sizes in ((3, 20, ("a_ptr",)), (5, 40, ("b_ptr",)), (4, 1, ("a_ptr", "b_ptr")))),
    conv1d(44),
    *(awq(m, moved) for m, moved in ((44, ("a_ptr",)), (44, ("q_ptr",)), (1, ("q_ptr", "s_ptr")))),
    *map(column_softmax, (44, 9)),
    dropout_add(44),
    entropy_parts(9),
    norm_with_parts(44),
    *map(sum_of_parts, (96, 48)),
    *(combined_parts(*sizes) for sizes in ((6, 3), (4, 1))),
]
FORMS = [
    *map(rms_backward, (44, 9)),
    *(grouped_decode(*sizes) for sizes in ((44, 4, 2), (9, 3, 3))),
    *(counted_up(*sizes) for sizes in ((44, 40, 40, ("a_ptr",)), (1, 40, 33, ("b_ptr",)))),
    *(int8_pointers(m, moved) for m, moved in ((44, ("x_ptr",)), (1, ("w_ptr",)))),
]
CASES = [*PLACES, *PUBLIC, *FURTHER, *FORMS]


@cache
def read(kernel: Any) -> AnnotatedKernel:
    return kernel_of(*kernel_location(kernel))


def tensor_named(case: Case, parameter: str) -> str:
    kernel = read(case.kernel)
    said = [one.directive for one in (*kernel.loads, *kernel.stores)]
    return next(one.tensor for one in said if one.parameter == parameter)


def tensors(case: Case, rank: int) -> dict[str, torch.Tensor]:
    """A rank's own, but for what is gathered."""
    made = {}
    for at, (name, shape) in enumerate(case.shapes.items()):
        dtype = case.dtypes.get(name, torch.float32)
        generator = torch.Generator().manual_seed(100 * at + (0 if name in case.gathered else rank))
        whole = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator)
        made[name] = (whole if dtype == torch.int32 else whole % 7 - 3).to(dtype)
    return made | {name: torch.full_like(made[name], 99) for name in case.written}


def alone(case: Case, rank: int) -> dict[str, torch.Tensor]:
    given = tensors(case, rank)
    case.kernel[case.grid](**case.numbers, **given)
    return given


def shard(whole: torch.Tensor, group: Group) -> torch.Tensor:
    parts = whole.chunk(group.world_size)
    return parts[group.rank].contiguous() if group.rank < len(parts) else whole[:0]


def differences(case: Case, is_gathered: bool) -> tuple[str, list[float]]:
    group, given = resolve(None), {}
    given = tensors(case, group.rank)
    exact = {name: alone(case, group.rank)[name] for name in case.written}
    if is_gathered:
        wanted = dict(zip(map(partial(tensor_named, case), case.gathered), GATHERS, strict=False))
        given |= {name: shard(given[name], group) for name in case.gathered}
    else:
        wanted = {tensor_named(case, case.summed): SUM}
        exact[case.summed] = sum(alone(case, rank)[case.summed] for rank in range(group.world_size))
    fused = FusedKernel(read(case.kernel), wanted)  # type: ignore[arg-type]
    fused(**case.numbers, **given)
    return fused.checked, [float((given[name] - each).abs().max()) for name, each in exact.items()]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("is_gathered", [True, False])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_true_kernel_is_exact_on_ranks(case: Case, is_gathered: bool, world_size: int):
    for checked, off in run_ranks(differences, world_size, case, is_gathered):
        assert checked == CHECKED
        assert max(off) < 1e-4
