"""Calls whose cost for the host is counted (host_path.py) and timed (gpu_host_cost.py): every operator in its plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import overweave as ow
from campaigns.cases import ALL_GATHER, ALL_REDUCE, HOPPER, OFFERED, PLAIN, REDUCE_SCATTER, in_kernels
from overweave.ir.plan import LIBRARY
from overweave.schedules.records.record import Method
from overweave.tuner.measure.baselines import SEQUENTIAL

KERNEL, PACKED_SHARE = HOPPER, 32
GATHER, SCATTER, REDUCE = ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE
RECEIVE, SEND = "all_to_all_matmul", "matmul_all_to_all"


class Case(NamedTuple):
    """A call of an operator, by name, and its plan."""

    operator: str
    plan: str
    beside: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.operator, self.beside, self.plan)))


def has_few_launches(method: Method) -> bool:
    """Whether a library does all of it, or adds nothing and multiplies no pieces of shards, of which there are many.

    A method on two levels has not: its calls go to parts of a group that lies on several hosts.
    """
    in_pieces = method.takes("carrier") or method.has_levels or (method.is_plain and method.takes("pieces"))
    return (method.is_plain and not in_pieces) or (not in_pieces and (method.adds is None or method.adds.by != LIBRARY))


class Sizes(NamedTuple):
    """Of one rank's matmul, and where its tensors lie."""

    ranks: int
    m: int
    n: int
    k: int
    device: str = "cpu"


# Every method, in the kernel of Hopper if it has one; and what may be asked beside a product. Of plans by shards or
# blocks, and of those whose sums are passes of a library between other steps, the ones that a shipped table takes.
CASES = (
    *(Case(*one) for plain in OFFERED if has_few_launches(plain.method) for one in in_kernels(plain, (KERNEL,))),
    *(Case(operator, "per_shard") for operator in (GATHER, SCATTER)),
    *(Case(operator, "per_peer") for operator in (RECEIVE, SEND)),
    Case(GATHER, f"push {KERNEL} order=all_peers pieces=2"),
    *(Case(GATHER, f"push {KERNEL}", beside) for beside in ("three weights", "bias silu", "gate", "fp8")),
    Case(REDUCE, f"two_shot {KERNEL}", "norm"),
)
PLAIN_CASES = tuple(Case(*plain) for plain in PLAIN if plain.plan == SEQUENTIAL)


def sizes_of(case: Case, sizes: Sizes) -> Sizes:
    """Of a case among others of these sizes: packed messages are for few rows."""
    return sizes._replace(m=max(sizes.m // PACKED_SHARE, 1)) if "packed" in case.plan else sizes


def call_of(case: Case, group: dist.ProcessGroup, sizes: Sizes) -> Callable[[], object]:
    """The call, as a user makes it, with tensors that are the same every time."""
    sizes = sizes_of(case, sizes)
    dtype = torch.float8_e4m3fn if case.beside == "fp8" else torch.bfloat16
    rows = sizes.m // sizes.ranks if case.operator == GATHER else sizes.m
    x, w = _random(sizes, rows, sizes.k).to(dtype), _random(sizes, sizes.n, sizes.k).to(dtype).t()
    if case.operator not in (GATHER, REDUCE):
        return partial(getattr(ow, case.operator), x, w, group, plan=case.plan)
    if case.operator == REDUCE:
        norm = ow.RmsNorm(_random(sizes, 1, sizes.n)[0], _random(sizes, sizes.m, sizes.n)) if case.beside else None
        return partial(ow.matmul_all_reduce, x, w, group, norm=norm, plan=case.plan)
    if case.beside == "three weights":
        half, quarter = sizes.n // 2, sizes.n // 4
        weights = [w[:, :half], w[:, half : half + quarter], w[:, half + quarter :]]
        return partial(ow.all_gather_matmul, x, weights, group, plan=case.plan)
    return partial(ow.all_gather_matmul, x, w, group, plan=case.plan, **_beside(case, x, sizes))


def _beside(case: Case, x: torch.Tensor, sizes: Sizes) -> dict[str, Any]:
    if case.beside == "bias silu":
        return {"bias": _random(sizes, 1, sizes.n)[0], "activation": "silu"}
    if case.beside == "gate":
        return {"gate": _random(sizes, sizes.n, sizes.k).t(), "activation": "silu"}
    if case.beside == "fp8":
        by_row, by_column = x.new_ones(x.shape[0], 1, dtype=torch.float32), x.new_ones(1, sizes.n, dtype=torch.float32)
        return {"scale_x": by_row, "scale_w": by_column}
    return {}


def _random(sizes: Sizes, rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, device=sizes.device, dtype=torch.bfloat16)
