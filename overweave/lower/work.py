"""What is lowered, and what it becomes: a matmul or attention, steps among ranks, and the plan that is proven."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError
from overweave.hardware.machine import Machine, default_for, load
from overweave.ir.dtype import Dtype
from overweave.ir.plan import PartialSums, Plan
from overweave.ir.schedule import Apply, Goal, InitialContents, Schedule
from overweave.ir.verify.plan import MachineLimits, verify_plan, verify_schedule
from overweave.lower.layouts import RankMesh
from overweave.lower.writer import PATHS, Cuboid, Held, Members
from overweave.schedules.records.record import LoweringPath
from overweave.sim.realize import realize

DTYPES = ("bfloat16", "float16", "float32")


class MatmulOp(Struct, frozen=True):
    """`x [m, k] @ w [k, n] -> y [m, n]`. slices: Domino's, of the rows of x and of the columns of w: each slice is
    summed by the library beside the matmul of the next one."""

    m: int
    n: int
    k: int
    dtype: Dtype = "bfloat16"
    slices: tuple[int, int] = (1, 1)


class AttentionOp(Struct, frozen=True):
    """`softmax(q k^T) v -> o`, each `[batch, heads, rows, head_dim]`: dimension 0 is the batch, 1 the heads, 2 the
    rows."""

    batch: int
    heads: int
    rows: int
    head_dim: int
    dtype: Dtype = "bfloat16"


Op = MatmulOp | AttentionOp


class CommStep(Struct, frozen=True):
    """What travels of a tensor among which groups of ranks."""

    tensor: str
    kind: str
    groups: tuple[Members, ...]

    def __str__(self) -> str:
        return f"{self.tensor}: {self.kind} among {' '.join(map(str, self.groups))}"


class Lowered(Struct, frozen=True):
    """What placements, or loops, became.

    steps: what travels, in order. plan: proven, step by step: what a rank computes waits for all that it reads. fused:
    the same by an operator of the catalog, whose tiles run beside what travels; None where there is none. words: that
    operator, and what its `plan=` takes.
    """

    steps: tuple[CommStep, ...]
    plan: Plan
    fused: Plan | None = None
    words: tuple[str, str] | None = None

    @property
    def schedule(self) -> Schedule:
        return self.plan.schedule


def check_request(op: Op, path: str) -> None:
    """Raise InputError for sizes below 1, slices that are none, and an unknown path."""
    if path not in PATHS:
        raise InputError(f"path={str(path)[:40]!r}", "unknown", f"Use one of {', '.join(PATHS)}")
    if not isinstance(op, MatmulOp | AttentionOp):
        raise InputError("lower", f"a {type(op).__name__}", "Give a lower.MatmulOp or a lower.AttentionOp")
    for name in op.__struct_fields__:
        size = getattr(op, name)
        if name not in ("dtype", "slices") and (type(size) is not int or size < 1):
            raise InputError(f"{type(op).__name__} with {name}={size}"[:80], "no such size", "Give at least 1")
    if op.dtype not in DTYPES:
        found = "no dtype of a matmul or attention"
        raise InputError(f"{type(op).__name__} with dtype={op.dtype!r:.40}", found, f"Give one of {', '.join(DTYPES)}")
    slices = op.slices if isinstance(op, MatmulOp) else (1, 1)
    if (
        not isinstance(slices, tuple | list)
        or len(slices) != 2
        or any(type(count) is not int or count < 1 for count in slices)
    ):
        raise InputError(
            f"slices={slices}"[:60], "not two numbers of at least 1", "Give slices of rows, and of columns"
        )


def machine_of(mesh: RankMesh) -> Machine:
    """The machine that plans of a mesh are for."""
    return mesh.machine or load(default_for(mesh.ranks))


def plan_of(schedule: Schedule, mesh: RankMesh, dtype: Dtype, path: LoweringPath) -> Plan:
    """The plan of a handwritten schedule; where kernels compute whose tables are their own, the schedule alone is
    proven. Only sums of a template are rounded once. Raises ScheduleRefused."""
    plan = realize(schedule, machine_of(mesh), dtype)
    sums: PartialSums = "float32" if path == "template" else "result"
    realization = replace(plan.realization, partial_sums=sums)
    plan = replace(plan, problem=replace(plan.problem, operator=""), realization=realization)
    is_authors = any(isinstance(operation, Apply) for operation in schedule.operations)
    verdict = verify_schedule(schedule) if is_authors else verify_plan(plan, MachineLimits())
    if path == "direct" and verdict.refusals:  # not all groups and shares of a mesh are a library's
        found = str(verdict.refusals[0]).replace("\n", " ")[:160]
        raise InputError(f"path='direct' of {schedule.name}", found, "Use path='template'")
    verdict.raise_if_refused()
    return plan


def contents(held: Held, rank: int, box: Cuboid, tensor: str) -> list[InitialContents]:
    """What a rank has of a box of a tensor, by its rectangles."""
    pairs = zip(held.regions(rank, box), held.shape.rectangles(box), strict=True)
    found = [InitialContents(region, tensor, rows[0], cols[0]) for region, (rows, cols) in pairs]
    return [each for each in found if not each.region.is_empty]


def promised(found: list[InitialContents]) -> tuple[Goal, ...]:
    """What a kernel makes: regions that then hold this."""
    return tuple(Goal(each.region, each.tensor, each.row, each.col) for each in found)
