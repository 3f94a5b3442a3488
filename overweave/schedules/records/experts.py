"""The plans of layers of experts (overweave/moe): the one table of their names. A routing is known on the device alone,
so that they are programs of their own, and no methods of an operator of matmuls."""

from __future__ import annotations

from overweave.errors import InputError, nearest

SEQUENTIAL, PUSH = "sequential", "push"
# Plan -> summary.
PLANS = {
    SEQUENTIAL: "library collectives before and behind all matmuls",
    PUSH: "pushed by copy engine while tiles multiply what has come, and sums return while others are computed",
}
OPERATORS = ("all_gather_experts", "experts_reduce_scatter", "experts_all_reduce", "experts_mlp")

# Operator -> why none of its plans is taken unasked but the sequential one.
NOT_MEASURED = {"experts_all_reduce": "nobody has measured its other plans"}


def names() -> tuple[str, ...]:
    """Return every schedule of experts: `OPERATOR.PLAN`."""
    return tuple(f"{operator}.{plan}" for operator in OPERATORS for plan in PLANS)


def is_of_experts(name: str) -> bool:
    """Whether a schedule's name begins with an operator of experts."""
    return name.partition(".")[0] in OPERATORS


def operator_and_plan(name: str) -> tuple[str, str]:
    """Return the parts of a name. Raises InputError for one that is none."""
    if name not in names():
        cure = nearest("Schedules", name, names(), "overweave show")
        raise InputError(f"schedule {name[:60]}", "there is none of this name", cure)
    operator, _, plan = name.partition(".")
    return operator, plan
