"""One plan tried on every rank of a group: is it right, how far from the truth is it, and when did what run?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from msgspec import Struct, to_builtins

from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.shards import rows_of
from overweave.ir.timeline.timeline import Timeline
from overweave.ir.verify.plan import verify_schedule
from overweave.memory.group import Group, resolve
from overweave.ops.reference import PlainCollectives
from overweave.runtime.backends import load
from overweave.runtime.host.host import Depth, run_on_host, trace_on_host
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import method_of
from overweave.schedules.records.needs import obstacle
from overweave.schedules.records.record import MethodRequest
from overweave.tuner.space.target import Target, target_of, tile_options

NON_ZEROS = 16  # of a row of x, in the mean: every partial sum of such integers is exact, even in bf16
ERROR_RATIO = 1.05  # how much less exact than torch and its collectives a result may be
SEED = 2024
# Tiles of a size at which the interpreter still has several for each chunk, and how many steps of its main loops, at
# about 2 ms each, are worth a rank's wait.
EMULATED_TILES = {"block_m": 32, "block_n": 64, "block_k": 32}
INTERPRETED_STEPS = 4096

Tensors = dict[str, torch.Tensor]


class TrialCase(Struct, frozen=True):
    """What to try: a schedule of the catalog with its options, and where it runs.

    depth: on the CPU, `interpreter` runs the real kernels, `library` lets torch compute the tiles.
    """

    schedule: str
    problem: Problem
    options: dict[str, str | int]
    device: Literal["cpu", "cuda"]
    depth: Depth = "library"


class TrialResult(Struct, frozen=True, kw_only=True):
    """What came out. Errors are relative to fp64, in norm, over all ranks; that of torch + library beside ours.

    is_exact: with integers, every rank's result had the reference's bits. timeline: of one warm call.
    """

    case: TrialCase
    is_exact: bool
    error: float
    library_error: float
    timeline: Timeline

    @property
    def is_right(self) -> bool:
        """NaN is never right."""
        return self.is_exact and self.error <= max(self.library_error * ERROR_RATIO, 1e-12)


def case_of(
    schedule: str, problem: Problem, device: Literal["cpu", "cuda"], options: dict[str, str | int]
) -> TrialCase:
    """A schedule on a device: with the best tile kernel on a GPU; interpreted on the CPU, where that ends in time."""
    method = method_of(schedule)
    if not method.is_fused:
        return TrialCase(schedule, problem, options, device)
    if device == "cuda":
        best = tile_options(target_of(_device(device)), method)
        return TrialCase(schedule, problem, best | options, device)
    block_m, block_n, block_k = EMULATED_TILES.values()
    steps = -(-problem.m // block_m) * -(-problem.n // block_n) * -(-problem.k // block_k)
    if steps > INTERPRETED_STEPS or obstacle(MethodRequest(problem, options, Target("cpu")), method, "device"):
        return TrialCase(schedule, problem, options, device)
    few: dict[str, str | int] = {"pieces": 2} if method.takes("pieces") else {}
    return TrialCase(schedule, problem, {**EMULATED_TILES, **few, **options}, device, "interpreter")


def try_case(case: TrialCase, group: Group) -> TrialResult | None:
    """Runs a case twice, the second time traced. Collective; on rank 0 what came out, None elsewhere.

    Raises InputError for a schedule that is none, and whatever a call of the operator raises.
    """
    plan = build(case.schedule, case.problem, case.options, rank=group.rank)
    verify_schedule(plan.schedule).raise_if_refused()
    problem = plan.problem  # which rows a rank has, the plan says
    device = _device(case.device)
    run, trace = _on_gpu(plan, group, device) if case.device == "cuda" else _on_host(plan, group, case.depth)

    tensors = _integers(case.problem, group, device)
    run(tensors)
    wrong = int(not torch.equal(tensors["y"], _reference(problem, tensors, group)))
    tensors = _normal(case.problem, group, device)
    timeline = trace(tensors)

    doubled = {name: tensor.double() for name, tensor in tensors.items()}
    exact = _reference(problem, doubled, group)
    library = _reference(problem, tensors, group)
    sums = _total([wrong, _squares(tensors["y"] - exact), _squares(library - exact), _squares(exact)], group)
    if timeline is None:
        return None
    return TrialResult(
        case=case,
        is_exact=sums[0] == 0,
        error=_relative(sums[1], sums[3]),
        library_error=_relative(sums[2], sums[3]),
        timeline=timeline,
    )


def _relative(squares: float, exact: float) -> float:
    """The root of a sum of squared errors beside the exact one's; 0 for a product without elements."""
    return float((squares / exact) ** 0.5) if exact else float(squares)


def try_on_forked_rank(cases: tuple[TrialCase, ...]) -> object:
    """For `run_ranks`: the trials as plain data on rank 0, None elsewhere."""
    group = resolve(None)
    trials = [try_case(case, group) for case in cases]
    return to_builtins(trials) if group.rank == 0 else None


def _device(kind: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


TrialRun = Callable[[Tensors], None]
Trace = Callable[[Tensors], Timeline | None]


def _on_host(plan: Plan, group: Group, depth: Depth) -> tuple[TrialRun, Trace]:
    def split(tensors: Tensors) -> tuple[Tensors, Tensors]:
        return {name: tensors[name] for name in ("x", "w")}, {"y": tensors["y"]}

    return (
        lambda tensors: run_on_host(plan, group, *split(tensors), depth=depth),
        lambda tensors: trace_on_host(plan, group, *split(tensors), depth=depth),
    )


def _on_gpu(plan: Plan, group: Group, device: torch.device) -> tuple[TrialRun, Trace]:
    workspace = load("gpu workspace").of(group, device)

    def run(tensors: Tensors) -> None:
        load("gpu launch")(plan, group, tensors)(tensors)
        workspace.check()

    return run, lambda tensors: load("gpu trace")(plan, workspace, tensors)


def _integers(problem: Problem, group: Group, device: torch.device) -> Tensors:
    """x of mostly zeros and w, of -1, 0 and 1: sums of their products are exact in any order."""
    generator = _generator(group, device)
    depth = problem.k * (problem.world_size if problem.record.adds else 1)
    x = torch.randint(-1, 2, (problem.operand_rows(group.rank), problem.k), generator=generator, device=device)
    kept = torch.rand(x.shape, generator=generator, dtype=torch.float32, device=device) < NON_ZEROS / depth
    w = torch.randint(-1, 2, _weight_shape(problem, group), generator=generator, device=device)
    return _tensors(problem, group, x * kept, w)


def _normal(problem: Problem, group: Group, device: torch.device) -> Tensors:
    generator = _generator(group, device)
    shape = problem.operand_rows(group.rank), problem.k
    x = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
    w = torch.randn(
        _weight_shape(problem, group),
        generator=generator,
        dtype=torch.float32,
        device=device,
    )
    return _tensors(problem, group, x, w)


def _weight_shape(problem: Problem, group: Group) -> tuple[int, int]:
    return rows_of((problem.weight_rows(group.rank),)), problem.n


def _generator(group: Group, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(SEED + group.rank)


def _tensors(problem: Problem, group: Group, x: torch.Tensor, w: torch.Tensor) -> Tensors:
    """As the problem wants them, with an output of NaN."""
    dtype = getattr(torch, problem.dtype)
    y = torch.full((problem.result_rows(group.rank), problem.n), torch.nan, dtype=dtype, device=x.device)
    return {"x": x.to(dtype), "w": w.to(dtype), "y": y}


def _reference(problem: Problem, tensors: Tensors, group: Group) -> torch.Tensor:
    result: torch.Tensor = problem.record.reference(
        tensors, PlainCollectives(group.process_group, problem.m, problem.strip)
    )
    return result


def _total(numbers: list[float], group: Group) -> list[float]:
    sums = torch.tensor(numbers, dtype=torch.float64, device=group.device)
    dist.all_reduce(sums, group=group.process_group)
    totals: list[float] = sums.tolist()
    return totals


def _squares(difference: torch.Tensor) -> float:
    return float(difference.double().square().sum())
