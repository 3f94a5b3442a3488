"""Every way to break a schedule, by name. A mutation returns None where there is nothing to change."""

from __future__ import annotations

from random import Random

from campaigns.oracle import broken_data, broken_order
from campaigns.oracle.broken_blocks import BLOCKS
from campaigns.oracle.changes import Mutation
from overweave.ir.schedule import Schedule


def two_at_once(rng: Random, schedule: Schedule) -> Schedule | None:
    """Two small changes: one may hide the other."""
    first, second = rng.sample(_SINGLE, 2)
    changed = first(rng, schedule)
    return second(rng, changed) if changed is not None else None


_SINGLE: tuple[Mutation, ...] = (
    broken_order.drop_signal,
    broken_order.duplicate_signal,
    broken_order.misdirect_signal,
    broken_order.swap_signals,
    broken_order.drop_wait,
    broken_order.misdirect_wait,
    broken_order.swap_waits,
    broken_order.wait_too_late,
    broken_order.wrong_count,
    broken_data.drop_chunk,
    broken_data.duplicate_chunk,
    broken_data.misdirect_chunk,
    broken_data.misdirect_store,
    broken_data.misdirect_retire,
    broken_data.duplicate_retire,
    broken_data.drop_tile,
    broken_data.duplicate_tile,
    broken_data.misdirect_tile,
    broken_order.early_reuse,
    broken_order.few_credits,
    broken_order.launch_order,
    broken_order.cycle,
    broken_data.overlap,
    broken_data.out_of_bounds,
    broken_data.contribution_order,
    broken_order.issue_for_completion,
    broken_order.wrong_queue,
    broken_order.stale_read,
    broken_order.collectives_in_another_order,
    broken_data.wrong_slot,
    broken_data.finished_otherwise,
    broken_data.swapped_blocks,
    broken_data.no_bijection,
    broken_data.hole_in_range,
    *BLOCKS,
)
MUTATIONS: dict[str, Mutation] = {mutation.__name__: mutation for mutation in (*_SINGLE, two_at_once)}
