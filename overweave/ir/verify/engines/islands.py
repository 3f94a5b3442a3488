"""Premises of ranks on several islands: nobody reaches memory of another one, and the library's calls keep one order.

An island is the ranks that map each other's memory (`Problem.islands`). Between islands the library alone moves rows:
each part of its calls touches its own rank's memory. That all ranks make their calls in one order is the rule of
deadlock (rules/deadlock.py), which holds for calls of the same ranks on any streams; calls of unlike ranks have unlike
communicators, which a stream alone orders on the device.
"""

from __future__ import annotations

from itertools import chain

from overweave.ir.plan import Plan
from overweave.ir.schedule import Collective
from overweave.ir.verify.rules.verdict import Findings


def check_islands(plan: Plan, findings: Findings) -> None:
    """Refuse reads, writes, signals and credits between islands, and calls of unlike ranks on unlike streams."""
    _check_streams(plan, findings)
    islands = plan.problem.islands
    if not islands:
        return
    if sorted(chain(*islands)) != list(range(plan.schedule.world_size)):
        findings.add("form", None, f"islands {islands} do not name each of {plan.schedule.world_size} ranks once")
        return
    lies_on = {rank: at for at, ranks in enumerate(islands) for rank in ranks}
    for operation in plan.schedule.operations:
        own = lies_on[operation.rank]
        for region in (*operation.reads, *operation.writes):
            if lies_on[region.rank] != own:
                found = f"rank {operation.rank} maps no memory of rank {region.rank}, on another island"
                findings.add("island", operation, found, region)
        for notify in operation.notifies:
            if lies_on[notify.rank] != own:
                findings.add(
                    "island", operation, f"notifies {notify}, on another island, whose signals it cannot reach"
                )
    for credit in plan.schedule.credits:
        if lies_on[credit.giver] != lies_on[credit.taker]:
            found = f"a credit of rank {credit.giver} for rank {credit.taker}, on another island, which it cannot reach"
            findings.add("island", None, found)


def _check_streams(plan: Plan, findings: Findings) -> None:
    """Refuse a rank's calls of unlike ranks in several queues."""
    queues: dict[int, tuple[str, tuple[int, ...]]] = {}
    for operation in plan.schedule.operations:
        if not isinstance(operation, Collective):
            continue
        queue, ranks = queues.setdefault(operation.rank, (operation.queue, operation.ranks))
        if queue != operation.queue and ranks != operation.ranks:
            found = f"a call of ranks {operation.ranks[:16]} beside one of {ranks[:16]} in queue {queue}"
            findings.add("island", operation, f"{found}: no stream orders them")
