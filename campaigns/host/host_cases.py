"""Calls whose cost for the host is counted (host_path.py) and timed (gpu_host_cost.py): every operator in its plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

import overweave as ow

KERNEL = "kernel=hopper"
PACKED_SHARE = 32
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


class Case(NamedTuple):
    """A call of an operator, by name, and its plan."""

    operator: str
    plan: str
    extras: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.operator, self.extras, self.plan)))


class Sizes(NamedTuple):
    """Of one rank's matmul, and where its tensors lie."""

    ranks: int
    m: int
    n: int
    k: int
    device: str = "cpu"


# The default plans and those of the shipped tables; torch's own operators take what torch takes.
CASES = (
    Case(GATHER, "sequential"),
    Case(SCATTER, "sequential"),
    Case(REDUCE, "sequential"),
    Case(GATHER, f"push {KERNEL}"),
    Case(GATHER, f"push {KERNEL} order=all_peers pieces=2"),
    Case(GATHER, "gather_packed"),
    Case(GATHER, "per_shard"),
    Case(GATHER, f"push {KERNEL}", "three weights"),
    Case(GATHER, f"push {KERNEL}", "bias silu"),
    Case(GATHER, f"push {KERNEL}", "gate"),
    Case(GATHER, f"push {KERNEL}", "fp8"),
    Case(SCATTER, f"scatter {KERNEL} own_pieces=4"),
    Case(SCATTER, f"fused_ring {KERNEL}"),
    Case(SCATTER, f"ring_stored {KERNEL}"),
    Case(SCATTER, f"scatter_pull {KERNEL}"),
    Case(SCATTER, "scatter_packed"),
    Case(REDUCE, f"two_shot {KERNEL}"),
    Case(REDUCE, f"two_shot {KERNEL}", "norm"),
    Case(REDUCE, f"ring_stored {KERNEL}"),
    Case(REDUCE, "one_shot_packed"),
    Case(REDUCE, "two_shot_packed"),
)


def sizes_of(case: Case, sizes: Sizes) -> Sizes:
    """Of a case among others of these sizes: packed messages are for few rows."""
    return sizes._replace(m=max(sizes.m // PACKED_SHARE, 1)) if "packed" in case.plan else sizes


def call_of(case: Case, group: dist.ProcessGroup, sizes: Sizes) -> Callable[[], object]:
    """The call, as a user makes it, with tensors that are the same every time."""
    sizes = sizes_of(case, sizes)
    dtype = torch.float8_e4m3fn if case.extras == "fp8" else torch.bfloat16
    rows = sizes.m // sizes.ranks if case.operator == GATHER else sizes.m
    x, w = _random(sizes, rows, sizes.k).to(dtype), _random(sizes, sizes.n, sizes.k).to(dtype).t()
    if case.operator == SCATTER:
        return partial(ow.matmul_reduce_scatter, x, w, group, plan=case.plan)
    if case.operator == REDUCE:
        norm = ow.RmsNorm(_random(sizes, 1, sizes.n)[0], _random(sizes, sizes.m, sizes.n)) if case.extras else None
        return partial(ow.matmul_all_reduce, x, w, group, norm=norm, plan=case.plan)
    if case.extras == "three weights":
        half, quarter = sizes.n // 2, sizes.n // 4
        weights = [w[:, :half], w[:, half : half + quarter], w[:, half + quarter :]]
        return partial(ow.all_gather_matmul, x, weights, group, plan=case.plan)
    return partial(ow.all_gather_matmul, x, w, group, extras=_extras(case, x, sizes), plan=case.plan)


def _extras(case: Case, x: torch.Tensor, sizes: Sizes) -> ow.Extras | None:
    if case.extras == "bias silu":
        return ow.Extras(bias=_random(sizes, 1, sizes.n)[0], activation="silu")
    if case.extras == "gate":
        return ow.Extras(gate=_random(sizes, sizes.n, sizes.k).t(), activation="silu")
    if case.extras == "fp8":
        by_row, by_column = x.new_ones(x.shape[0], 1, dtype=torch.float32), x.new_ones(1, sizes.n, dtype=torch.float32)
        return ow.Extras(scale_x=by_row, scale_w=by_column)
    return None


def _random(sizes: Sizes, rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols, device=sizes.device, dtype=torch.bfloat16)
