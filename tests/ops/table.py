"""The law of the operators as a table: a plan x what follows its product x rows x dtype, and plain torch's result.

It is read through the public functions on CPU ranks, where every plan is proven first and torch computes whole
operations (test_table.py), and by the actual kernels, interpreted (tests/runtime/interpreted_table.py). Whole numbers
come out to the bit where nothing is rounded twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch.nn.functional import rms_norm

from campaigns.cases import ALL_GATHER, Named
from campaigns.exact import calls
from campaigns.exact.calls import BARE, EPS, FP8, Case, Form, Inputs, expected, make_inputs, results
from overweave.schedules.catalog.catalog import names
from overweave.schedules.records.needs import obstacle
from overweave.schedules.records.record import MethodRequest
from overweave.tuner.space.target import Target

# What may follow a product: of a campaign's, each that differs in what is read or how it is read; and more of fp8.
FORMS = (
    *calls.FORMS,
    Form(activation="silu"),
    Form(scaling="rows", bias=True, activation="silu"),
    Form(scaling="rows", gate=True, activation="gelu", residual=True),
    Form(scaling="tensor", weights=2, bias=True, out_dtype=torch.float16),
    Form(scaling="tensor", out_dtype=torch.float32),
    Form(scaling="rows", norm=True, residual=True),
)
# Beside every method as it is: with options that change what is moved, in which pieces, and who adds.
WITH_OPTIONS = {
    "all_gather_matmul": (
        "per_shard order=all_peers",
        "push pieces=1",
        "push pieces=3 order=all_peers",
        "push mover=copy_kernel copy_programs=2",
        "push block_m=16 block_n=16",
        "pull pieces=3",
        "mesh pieces=3 col_pieces=2 lanes=2 axis=outer island=3",
        "ring pieces=1 lanes=2",
        "double_ring pieces=3 col_pieces=2",
        "uniform_fused_1d carrier=library",
        "uniform_fused_2d order=ring",
        "hetero_unfused_1d order=ring",
        "hetero_fused_2d carrier=library",
    ),
    "matmul_reduce_scatter": (
        "per_shard order=all_peers",
        "scatter pieces=3 order=all_peers",
        "scatter pieces=2 own_pieces=2",
        "scatter mover=copy_kernel copy_programs=2",
        "scatter sums=epilogue pieces=2",
        "scatter_stored pieces=3 order=all_peers block_m=16 block_n=16",
        "scatter_pull pieces=3 own_pieces=2 block_m=16 block_n=16",
        "fused_ring pieces=3 block_m=16 block_n=16",
        "ring_stored pieces=3 block_m=16 block_n=16",
        "remote_add pieces=3 order=all_peers",
        "decomposed pieces=3",
        "waves sms=6 library_sms=2 block_m=16 block_n=16",
    ),
    "matmul_all_reduce": (
        "two_shot pieces=1",
        "two_shot pieces=3 sums=epilogue",
        "ring_stored pieces=3 block_m=16 block_n=16",
        "decomposed pieces=3",
        "waves sms=4 block_m=16 block_n=16",
    ),
}
LIBRARY = (None, "sequential", "per_shard", "decomposed")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# Of so many calls one is made, by ranks: many ranks take long. Coprime to how many rows, dtypes and layouts there are.
EVERY = {1: 7, 2: 1, 3: 7, 4: 7, 8: 23}


def plans(operator: str, world_size: int) -> tuple[str | None, ...]:
    """No name, every method of the catalog, and methods with options."""
    own = (None, *(name.partition(".")[2] for name in names(operator)), *WITH_OPTIONS[operator])
    return tuple(plan for plan in own if world_size % 3 == 0 or "island=3" not in (plan or ""))


def formed(operator: str, world_size: int) -> list[Case]:
    """Every plan with all that may follow it: numbers of rows, dtypes and layouts by turns."""
    rows, found = (37, 1, 0, world_size - 1), []
    for form, plan in product(FORMS, plans(operator, world_size)):
        turn, n, k = len(found), (144 if form.weights > 1 else 48), 32
        dtype, is_turned = (FP8, True) if form.scaling else (DTYPES[turn // 4 % 3], turn // 12 % 2 > 0)
        case = Case(operator, rows[turn % 4], n, k, dtype, is_turned, plan, form)
        if form.suits(case.record) and not (plan and refused(case, world_size)):
            found.append(case)
    return found[:: EVERY[world_size]]


def bare(operator: str, world_size: int) -> list[Case]:
    """Products alone: every plan, any number of rows, every dtype and layout, and for libraries ragged sizes."""
    dtypes, rows = DTYPES[: 1 if world_size == 8 else 3], (0, 1, world_size - 1, world_size, 67)
    found = []
    for plan, dtype, is_turned, m in product(plans(operator, world_size), dtypes, (False, True), rows):
        sizes = (m, 13, 9) if plan in LIBRARY else (m, 24, 16)
        form = Form(gathered=m % 2 > 0) if operator == ALL_GATHER else BARE
        found.append(Case(operator, *sizes, dtype, is_turned, plan, form))
    return found[world_size % 7 :: 7]


def refused(case: Case, world_size: int) -> str:
    """Why a CPU does not take a plan with what follows it; empty if it does."""
    named = Named(case.operator, str(case.plan))
    asked = MethodRequest(case._replace(m=37).problem(world_size), named.options, Target("cpu"))
    return obstacle(asked, named.method, "device")


def faults(cases: list[Case]) -> list[str]:
    """For `run_ranks`: what differs from plain torch on this rank, each call made twice with other tensors."""
    return [f"{case} turn {turn}: {found}" for case in cases for turn in range(2) if (found := fault(case, turn))]


def fault(case: Case, seed: int) -> str:
    """What is wrong with one call."""
    inputs = make_inputs(case, seed, exact=True)
    return differs(case, inputs, results(case, inputs))


def differs(case: Case, inputs: Inputs, found: Sequence[torch.Tensor]) -> str:
    """What differs from plain torch in fp64. Products are rounded once by a kernel, and at each step by a library."""
    form, truth = case.form, expected(case, inputs, torch.float64)
    if form.gathered:
        *found, gathered = found
        if not torch.equal(gathered, inputs.gathered):
            return "what was gathered differs"
    y = found[-1] if form.norm else torch.cat(found, dim=1)
    if y.shape != truth.shape or y.dtype != case.out_dtype:
        return f"{y.dtype} {[*y.shape]}"
    if form.is_exact and (not form.bias or case.dtype != FP8):
        if not torch.equal(y, truth.to(y.dtype)):
            return f"not exact, off by {float((y.double() - truth).abs().max()):.2e}"
    elif not torch.allclose(y.double(), truth, near := nearness(case), near):
        return f"off by {float((y.double() - truth).abs().max()):.2e}"
    if form.norm and inputs.norm_weight is not None:
        normed = rms_norm(y, (case.n,), inputs.norm_weight, EPS)
        if not torch.allclose(found[0], normed, torch.finfo(y.dtype).eps, 1e-6):
            return f"norm off by {float((found[0] - normed).abs().max()):.2e}"
    return "" if not case.record.shares_sums or _is_shared(found[0]) else "other bits than on the first rank"


def nearness(case: Case) -> float:
    """By how much a result may be off: half of the last bit for each rounding, or what fp32 loses."""
    if case.out_dtype == torch.float32:
        return 2**-16
    roundings = 1 if case.record.adds and case.plan not in LIBRARY else 2
    return torch.finfo(case.out_dtype).eps / 2 * (roundings + 2 * case.form.gate)


def _is_shared(y: torch.Tensor) -> bool:
    first = y.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, y)
