"""Which plan an operator takes for a problem, and why: the answer to "what did it do?"."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import UNSET
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.ir.operators.registry import operator_of
from overweave.ir.problem import Problem
from overweave.ops.call.operands import TAKEN, name_of
from overweave.schedules.catalog.catalog import check_problem
from overweave.tuner.model.choose import Choice, explain_choice
from overweave.tuner.space.shapes import DTYPES, as_benchmarked, with_epilogue
from overweave.tuner.space.target import Target, over_hosts, target_of, with_margin


def explain(
    operator: str,
    *,
    m: int,
    n: int | Sequence[int],
    k: int,
    world_size: int,
    dtype: torch.dtype | str = torch.bfloat16,
    device: torch.device | str = "cuda",
    after: str = "",
) -> Choice:
    """The plan that `operator` takes for `[m, k] @ [k, n]` on each of `world_size` ranks; print it to read the reasons.

    It says where the answer comes from (this machine's measurements, the package's, a neighbour's, or the model) and
    weighs every candidate: predicted, measured where somebody did, or why it cannot be.
    m: rows after the gather or before the scatter; n and k: as one rank's matmul has them. n, a list or tuple: the
    columns of each of several weights (all_gather_matmul). dtype: fp8 (e4m3) is scaled by rows, into bf16; a name such
    as "bfloat16", or a word of the command line such as "bf16", will do.
    after: what happens to the product, words joined by `+`: `bias`, `silu`, `gelu`, `gelu_tanh`, `gate`, `residual`
    (each as the operator's keyword; `gate`, all_gather_matmul alone), `rms_norm` (of sums that ranks share or scatter,
    as ow.RmsNorm).
    Without a GPU at hand, device "cuda" means an H200.
    Under `ow.settings(batch_invariant=True)` it says which candidates do not have one order over k and over ranks.
    Raises InputError for an unknown operator, dtype or device, sizes that are none, and what the operator has not.
    """
    problem = problem_to_choose_for("explain", operator, (m, n, k), (world_size, dtype, after))
    target = target_for(device_of("explain", device), world_size)
    return explain_choice(replace(problem, islands=target.islands or UNSET), target)


def target_for(device: torch.device, world_size: int) -> Target:
    """What runs there; without a GPU at hand, a GPU is an H200. More ranks than a host has GPUs lie on several."""
    is_at_hand = device.type == "cpu" or torch.cuda.is_available()
    target = target_of(device) if is_at_hand else with_margin(Target(device.type))
    return over_hosts(target, world_size)


def problem_to_choose_for(
    asked: str, operator: str, sizes: tuple[int, int | Sequence[int], int], others: tuple[int, torch.dtype | str, str]
) -> Problem:
    """A problem as `explain` and `tune` take it. sizes: m, n, k. others: the world size, the dtype, and what follows.

    Raises InputError for what is none, and for what the operator has not.
    """
    operator_of(operator, asked)
    (m, n, k), (world_size, dtype, after) = sizes, others
    columns = tuple(n) if isinstance(n, Sequence) else (n,)
    are_ints = all(isinstance(size, int) for size in (m, *columns, k, world_size))
    if not columns or not are_ints or min(m, *(each - 1 for each in columns), k - 1, world_size - 1) < 0:
        found = f"m={m} n={n} k={k} world_size={world_size}"
        raise InputError(f"{asked} {operator}", found, "Pass ints, m at least 0, the others at least 1")
    known = {name_of(each): each for each in TAKEN}
    name = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else name_of(dtype)
    if name not in known:
        raise InputError(f"{asked} {operator}", f"dtype {dtype}", f"Use one of {', '.join(map(str, TAKEN))}")
    problem = Problem(operator=operator, m=m, n=sum(columns), k=k, world_size=world_size, dtype=name_of(known[name]))
    check_problem(f"{asked} {operator}", problem)
    return with_epilogue(as_benchmarked(problem), columns, after)


def device_of(asked: str, device: torch.device | str) -> torch.device:
    """A device by name, for what is asked. Raises InputError for one on which no operator runs."""
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{asked} on device {device}", "there is no such device", "Use cpu or cuda") from error
    if where.type not in ("cpu", "cuda"):
        raise InputError(f"{asked} on device {device}", "overweave does not run there", "Use cpu or cuda")
    return where
