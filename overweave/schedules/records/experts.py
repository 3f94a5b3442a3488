"""The plans of layers of experts (overweave/moe): the one table of their names. A routing is known on the device alone,
so that they are programs of their own."""

from __future__ import annotations

from overweave.schedules.records.programs import Programs

SEQUENTIAL, PUSH = "sequential", "push"
# Plan -> summary.
PLANS = {
    SEQUENTIAL: "library collectives before and behind all matmuls",
    PUSH: "pushed by copy engine while tiles multiply what has come, and sums return while others are computed",
}
OPERATORS = ("all_gather_experts", "experts_reduce_scatter", "experts_all_reduce", "experts_mlp")
EXPERTS = Programs("experts", OPERATORS, PLANS)
# Operator -> why none of its plans is taken unasked but the sequential one.
NOT_MEASURED = {"experts_all_reduce": "nobody has measured its other plans"}
