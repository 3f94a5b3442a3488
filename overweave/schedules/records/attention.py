"""The plans of attention over a sequence that ranks share (overweave/attention): the one table of their names."""

from __future__ import annotations

from overweave.schedules.records.programs import Programs

SEQUENTIAL, PER_SHARD, RING, DOUBLE_RING, HEADS = "sequential", "per_shard", "ring", "double_ring", "heads"
# Plan -> summary.
PLANS = {
    SEQUENTIAL: "the library gathers keys and values before all pieces, and sums gradients behind",
    PER_SHARD: "ranks push keys and values to those that see them, which compute shard by shard as they arrive",
    RING: "ranks pass shards on to the next while they compute on them, in the memory of two",
    DOUBLE_RING: "a ring inside islands of ranks, within a ring across them",
    HEADS: "all-to-alls give a rank some heads of all rows, and back",
}
OPERATORS = ("attention", "attention_gradients")
ATTENTION = Programs("attention", OPERATORS, PLANS)
