"""Breaks right plans and compares verify with what becomes of them on a GPU of few SMs.

`python -m campaigns.plan_mutations --count 20000`. A mutant that verify accepts must end for every order of streams
(`gpu_model.py`), leave no two accesses unordered (there, too) and bind (`bound.py`); small ones are run in every
interleaving, with counts that differ from call to call (`interleavings.py`); some changes are never right.
What verify refuses and these runs find nothing in is counted by class and rule: verify demands more than they see.

`--verifier OLD_CHECKOUT` holds the runs against the verifier of another commit, which says what that one missed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path
from random import Random
from time import perf_counter

from msgspec.structs import replace
from rich.console import Console

from campaigns.oracle.interleavings import explore
from campaigns.oracle.plans.bound import obstacle
from campaigns.oracle.plans.broken_plans import MUTATIONS, NEVER_RIGHT, RUN, right_plans
from campaigns.oracle.plans.gpu_model import hang, race
from campaigns.oracle.plans.other_verifier import OtherVerifier
from campaigns.oracle.tally import Tally, holes, right_refused, table
from campaigns.shown import shown
from overweave.errors import OverweaveError
from overweave.ir.plan import Plan
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.ir.verify.rules.verdict import Verdict
from overweave.schedules.tiles.order import tile_orders

MOST_DRAWS = 5000  # for a mutant
Verifier = Callable[[Plan], Verdict]


def proven_here(plan: Plan) -> Verdict:
    return verify_plan(plan, MachineLimits())


def mutant(name: str, rng: Random, plans: list[Plan]) -> Plan:
    """A plan that a mutation changed, tile tables made anew."""
    for _ in range(MOST_DRAWS):
        plan = rng.choice(plans)
        changed = MUTATIONS[name](rng, plan)
        if changed is None or changed == plan:
            continue
        try:
            return replace(changed, tile_orders=tile_orders(changed.schedule, changed.realization))
        except (OverweaveError, LookupError):
            continue
    raise LookupError(f"no plan can be changed by {name}")


def judged(name: str, plan: Plan) -> tuple[str, str]:
    """What is wrong with a mutant, and how it shows; `right` if nothing is seen."""
    if name in NEVER_RIGHT:
        return "never right", plan.name
    if how := hang(plan):
        return "stuck", how
    if how := race(plan):
        return "conflict", how
    if how := obstacle(plan):
        return "unbound", how
    if name in RUN and (outcome := explore(plan.schedule)).kind != "right":
        return outcome.kind, outcome.message
    return "right", ""


def campaign(
    per_class: int, seed: int = 0, classes: Iterable[str] = tuple(MUTATIONS), verifier: Verifier = proven_here
) -> dict[str, Tally]:
    """So many mutants of each class."""
    plans, tallies = list(right_plans()), {name: Tally() for name in classes}
    drawn = ((name, at) for name in tallies for at in range(per_class))
    for name, at in shown(drawn, "mutants of plans", per_class * len(tallies), itemgetter(0)):
        plan = mutant(name, Random(f"{name}.{seed}.{at}"), plans)
        label = f"{plan.name} {plan.schedule.world_size} ranks {seed}.{at}"
        tallies[name].add(label, verifier(plan), *judged(name, plan))
    return tallies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="mutants of all classes together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(MUTATIONS), help="classes")
    parser.add_argument("--verifier", type=Path, help="a checkout whose verifier is judged")
    asked = parser.parse_args()
    started = perf_counter()
    with OtherVerifier(asked.verifier) if asked.verifier else nullcontext(proven_here) as verifier:
        tallies = campaign(-(-asked.count // len(asked.only)), asked.seed, asked.only, verifier)
    Console(width=160).print(table(tallies))
    for line in (*right_refused(tallies), *holes(tallies)[:40]):
        print(line)
    mutants, missed = sum(tally.mutants for tally in tallies.values()), len(holes(tallies))
    print(f"{mutants} mutants of plans, {missed} wrongly accepted, {perf_counter() - started:.0f} s")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
