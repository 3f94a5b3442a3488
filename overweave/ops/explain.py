"""Which plan an operator takes for a problem, and why: the answer to "what did it do?"."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.epilogue import Norm
from overweave.ops.all_gather_matmul import OPERATOR as GATHERED
from overweave.ops.matmul_all_reduce import OPERATOR as NORMED
from overweave.ops.norm import RmsNorm
from overweave.ops.scales import FP8, problem_of
from overweave.tuner.choice import Choice
from overweave.tuner.choose import explained
from overweave.tuner.space import SPACE
from overweave.tuner.target import Target, target_of


def explain(
    operator: str,
    *,
    m: int,
    n: int | Sequence[int],
    k: int,
    world_size: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    norm: bool = False,
) -> Choice:
    """The plan that `operator` takes for `[m, k] @ [k, n]` on each of `world_size` ranks; print it to read the reasons.

    It says where the answer comes from (this machine's measurements, the package's, a neighbour's, or the model) and
    weighs every candidate: predicted, measured where somebody did, or why it cannot be.
    m: rows after the gather or before the scatter; n and k: as one rank's matmul has them. n, a list or tuple: the
    columns of each of several weights (all_gather_matmul, not fp8). dtype: fp8 (e4m3) is scaled by rows, into bf16.
    Without a GPU at hand, device "cuda" means an H200. norm: of a call that ends with a residual and an RMSNorm
    (matmul_all_reduce).
    Raises InputError for an unknown operator, dtype or device, sizes that are none, and what the operator has not.
    """
    if operator not in SPACE:
        raise InputError(f"explain {operator}", "there is no such operator", f"Operators: {', '.join(SPACE)}")
    columns = tuple(n) if isinstance(n, Sequence) else (n,)
    are_ints = all(isinstance(size, int) for size in (m, *columns, k, world_size))
    if not columns or not are_ints or min(m, *(each - 1 for each in columns), k - 1, world_size - 1) < 0:
        found = f"m={m} n={n} k={k} world_size={world_size}"
        raise InputError(f"explain {operator}", found, "Pass ints, m at least 0, the others at least 1")
    if norm and operator != NORMED:
        raise InputError(f"explain {operator} with a norm", "it has none", f"Only {NORMED} ends with one")
    if len(columns) > 1 and (operator != GATHERED or dtype == FP8):
        found = f"{operator} of {dtype} takes one"
        raise InputError(f"explain {len(columns)} weights", found, f"Only {GATHERED} takes several, not in fp8")
    where = _device(device)
    problem = problem_of(operator, (m, sum(columns), k), world_size, dtype)
    ended = Norm(eps=RmsNorm._field_defaults["eps"], residual=True) if norm else None
    problem = replace(problem, columns=columns if len(columns) > 1 else (), norm=ended)
    has_gpu = where.type == "cuda" and torch.cuda.is_available()
    target = target_of(where) if has_gpu or where.type == "cpu" else Target("cuda")
    return explained(problem, target)


def _device(device: torch.device | str) -> torch.device:
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"explain on device {device}", "there is no such device", "Use cpu or cuda") from error
    if where.type not in ("cpu", "cuda"):
        raise InputError(f"explain on device {device}", "overweave does not run there", "Use cpu or cuda")
    return where
