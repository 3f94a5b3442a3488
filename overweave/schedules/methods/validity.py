"""The one statement of validity: why a method cannot, or should not, compute a problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from overweave.ir.plan import TILE_KERNEL
from overweave.schedules.methods import needs
from overweave.schedules.methods.record import Asked, Method, Need, Stage

STAGES: tuple[Stage, ...] = get_args(Stage)


def obstacle(asked: Asked, method: Method, stage: Stage = "choice") -> str:
    """What stands against a method, the first thing found; empty if nothing does.

    stage: what to ask for: what any device refuses; also what this one does; also what another method does better.
    """
    return unmet(asked, needs_of(method, asked), stage)


def unmet(asked: Asked, needs: Iterable[Need], stage: Stage) -> str:
    """What the first need says that is asked for and not met; empty if all are met."""
    asking = STAGES[: STAGES.index(stage) + 1]
    return next((why for need in needs if need.stage in asking and (why := need.why(asked))), "")


def needs_of(method: Method, asked: Asked) -> Iterator[Need]:
    """All that a method needs: by its engines, by what is asked of it, and of its own."""
    if not method.is_plain:
        yield needs.SEVERAL
    yield needs.of_norms(method.norms)
    if method.has_kernels:
        yield needs.ALIGNED
        yield needs.TUNED_KERNELS
    if method.is_fused:
        yield needs.FEW_WEIGHTS
    if method.addresses_peers(asked.options):
        yield needs.PEER_ACCESS
    if TILE_KERNEL in method.moves:
        yield needs.FEW_PEERS
    yield from method.needs
    if method.has_messages:
        yield from needs.PACKABLE
    for option in asked.options.items():
        yield from needs.OF_VALUES.get(option, ())
    if not method.is_plain:
        yield needs.FULL_PIECES
