"""Short versions of verify's campaigns, and tests of the judge that they trust."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from random import Random

import msgspec
import pytest
from msgspec.structs import replace

from campaigns.oracle import verify_mutations, verify_valid
from campaigns.oracle.interleavings import explore
from campaigns.oracle.mutations import MUTATIONS
from campaigns.oracle.plans import plan_mutations
from campaigns.oracle.random.schedules import TEMPLATES
from campaigns.oracle.tally import Tally
from overweave.ir.problem import Problem
from overweave.ir.schedule import Collective, Operation, Region, Schedule
from overweave.ir.verify import plan as passes
from overweave.ir.verify.plan import verify_schedule
from overweave.ir.verify.rules.contents import Contents
from overweave.ir.verify.rules.deadlock import launch_order
from overweave.ir.verify.rules.graphs import build_graph
from overweave.ir.verify.rules.happens_before import past_of
from overweave.ir.verify.rules.values import unknown
from overweave.ir.verify.rules.verdict import Findings, WorkBudget
from overweave.schedules.catalog.catalog import build
from tests.ir.two_ranks import altered, exchange, put, sums, take, total

pytestmark = pytest.mark.slow
# In turn, until one breaks what the rule finds: which plans a seed breaks changes with the catalog.
SEEDS = range(2, 10)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.make.__name__)
def test_right_schedules_are_right_in_every_interleaving(template):
    for seed in range(3):
        schedule = template.make(Random(seed), 2, 1)
        assert verify_schedule(schedule).refusals == ()
        for serial in (False, True):
            assert explore(schedule, serial).kind == "right"
            assert explore(schedule, serial, reduced=False).kind in ("right", "unfinished")


@pytest.mark.parametrize(
    ("schedule", "kind"),
    [
        (exchange(), "right"),
        (sums(), "right"),
        (exchange(put(0, notifies=()), put(1), take(0), take(1)), "stuck"),
        (exchange(put(0, notifies=()), put(1), take(0), take(1, waits=())), "conflict"),
        (exchange(credits=()), "conflict"),
        (exchange(given=exchange().given[:1]), "unwritten"),
        (exchange(goal=(replace(exchange().goal[0], row=1),)), "value"),
        (altered(sums(), total_0=total(0, operands=total(0).operands[::-1])), "value"),
        (exchange(put(0, destinations=(replace(put(0).destinations[0], rows=(1, 3)),))), "malformed"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_the_judge_sees_what_is_wrong(schedule, kind):
    assert explore(schedule).kind == kind
    assert (explore(schedule, reduced=False).kind == "right") == (kind == "right")


def test_the_judge_sees_a_deadlock_that_only_serial_ranks_have():
    crossed = exchange(take(0), put(0), take(1), put(1))
    assert explore(crossed).kind == "right"
    assert explore(crossed, serial=True).kind == "stuck"


@pytest.mark.slow
def test_random_schedules_have_the_sizes_the_campaign_promises():
    sizes = [len(verify_valid.draw(seed).operations) for seed in range(120)]
    assert sorted(sizes)[60] >= 200
    assert sum(size > verify_valid.LARGE for size in sizes) >= 4
    assert {2, 8} <= {verify_valid.draw(seed).world_size for seed in range(40)}


@pytest.mark.slow
def test_valid_schedules_are_proven():
    result = verify_valid.campaign(90, processes=1, seed=77)
    assert result.refused == []
    assert result.seconds < 30


@pytest.mark.slow
def test_no_wrong_mutant_is_accepted():
    tallies = verify_mutations.campaign(per_class=12, seed=99)
    assert len(tallies) == len(MUTATIONS) >= 12
    for name, tally in tallies.items():
        assert tally.wrong_accepted == [], name
        assert tally.disputed == [], name
        assert tally.mutants + tally.unfinished == 12
    assert sum(tally.wrong_refused for tally in tallies.values()) > 100
    assert sum(tally.right_accepted for tally in tallies.values()) > 25


def test_a_hole_in_the_proof_would_be_seen():
    """The campaign's bookkeeping: a race that is called proven lands among the wrong and accepted."""
    tally = Tally()
    race = exchange(put(0, notifies=()), put(1), take(0), take(1, waits=()))
    tally.add("race", verify_schedule(exchange()), explore(race).kind, "")
    tally.add("none", verify_schedule(race), explore(exchange()).kind, "")
    assert len(tally.wrong_accepted) == len(tally.right_refused) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "mutation"),
    [
        ("reuse", "early_reuse"),
        ("caller_memory", "stale_read"),
        ("race", "issue_for_completion"),
        ("stale_read", "launch_order"),
        ("contribution_order", "contribution_order"),
        ("contributions", "drop_chunk"),
        ("unwritten", "drop_tile"),
        ("value", "wrong_slot"),
        ("double_write", "duplicate_chunk"),
        ("form", "swapped_blocks"),
        ("value", "rows_lose_their_place"),
        ("reuse", "next_call_fills_other_rows"),
        ("form", "uneven_members"),
        ("form", "all_reduce_apart"),
        ("form", "two_buffers_at_a_side"),
        ("deadlock", "collectives_in_another_order"),
        ("residency", "residency_without_tiles"),
        ("residency", "premise_of_launch"),
        ("width", "premise_of_launch"),
        ("form", "goal_against_problem"),
        ("form", "goal_dropped"),
        ("rounding", "rounding"),
        ("replay", "graph_safety"),
    ],
)
def test_a_rule_left_out_of_verify_is_missed(monkeypatch, rule, mutation):
    """Each rule is needed, of schedules and of plans: without it the campaign finds wrong mutants that are accepted."""

    class Lenient(Findings):
        def add(self, found, operation, message, region=None):
            if found != rule:
                super().add(found, operation, message, region)

    monkeypatch.setattr(passes, "Findings", Lenient)
    campaign = verify_mutations.campaign if mutation in MUTATIONS else plan_mutations.campaign
    assert any(campaign(60, seed, (mutation,))[mutation].wrong_accepted for seed in SEEDS)


def leaves(node: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The paths of all numbers and words in nested lists and maps."""
    if isinstance(node, dict):
        return [leaf for key, value in node.items() for leaf in leaves(value, (*path, key))]
    if isinstance(node, list):
        return [leaf for at, value in enumerate(node) for leaf in leaves(value, (*path, at))]
    return [path]


def spoiled(rng: Random, schedule: Schedule) -> Schedule | None:
    """The schedule with a few numbers and words replaced; None if the types refuse it already."""
    node = json.loads(msgspec.json.encode(schedule))
    paths = leaves(node)
    for _ in range(rng.randint(1, 4)):
        *path, last = rng.choice(paths)
        parent = node
        for step in path:
            parent = parent[step]
        if isinstance(parent[last], str):
            parent[last] = rng.choice(
                ["zz", "x", "y", "main", "arrived", "complete", "issue", "put.0", "local", "input"]
            )
        else:
            parent[last] = rng.choice([0, 1, 2, 3, 7, 2**31 - 2, 2**31 - 1, True])
    try:
        return msgspec.convert(node, Schedule)
    except msgspec.ValidationError:
        return None


def test_hostile_schedules_get_a_verdict():
    """Whatever a file says, verify answers, and never raises."""
    rng = Random(5)
    verdicts = []
    for _ in range(800):
        schedule = spoiled(rng, verify_mutations.small_schedule(rng))
        if schedule is not None:
            verdict = verify_schedule(schedule)
            verdicts.append(verdict.ok)
            assert all(str(refusal) for refusal in verdict.refusals)
    assert len(verdicts) > 300
    assert sum(verdicts) < len(verdicts) / 2


def test_numbers_that_no_file_could_hold_are_refused_too():
    """Schedules are built in Python as well, where nothing checks the types."""
    for change in ({"rank": -1}, {"rank": 2**40}, {"notifies": (replace(put(0).notifies[0], signal=-1),)}):
        assert not verify_schedule(exchange(put(0, **change), put(1), take(0), take(1))).ok
    assert not verify_schedule(exchange(world_size=0, operations=(), given=(), goal=(), credits=())).ok


def test_large_schedules_take_linear_time():
    """Ten times the operations, far less than a hundred times the work."""
    small, large = (TEMPLATES[0].make(Random(1), 8, pieces) for pieces in (3, 30))
    assert len(large.operations) > 8 * len(small.operations)
    steps = [count_steps(schedule) for schedule in (small, large)]
    assert steps[1] < 16 * steps[0]


def test_forty_thousand_operations_are_proven():
    schedule = TEMPLATES[0].make(Random(1), 8, 360)
    assert len(schedule.operations) > 40_000
    assert verify_schedule(schedule).outcome == "proven"


@pytest.mark.parametrize(("function", "side"), [("all_gather", "destinations"), ("reduce_scatter", "sources")])
def test_shares_that_are_folded_are_still_told_apart(function: str, side: str):
    """Shares in another order, one of them twice, or one that is not there, are refused, on one rank or on all."""
    schedule = collective(function, 4)
    parts = [one for one in schedule.operations if isinstance(one, Collective)]

    def with_shares(shares: Callable[[tuple[Region, ...]], tuple[Region, ...]], changed: list[Operation]) -> Schedule:
        operations = tuple(
            replace(one, **{side: shares(getattr(one, side))}) if one in changed else one for one in schedule.operations
        )
        return replace(schedule, operations=operations)

    for changed in (parts[:1], parts):
        assert verify_schedule(with_shares(lambda shares: (*shares[1:], shares[0]), changed)).refusals
        assert verify_schedule(with_shares(lambda shares: (shares[0], *shares[:-1]), changed)).refusals
        assert verify_schedule(with_shares(lambda shares: shares[:-1], changed)).refusals
        assert verify_schedule(with_shares(lambda shares: tuple(map(shorter, shares)), changed)).refusals
    whole = with_shares(lambda shares: (replace(shares[0], rows=(shares[0].rows[0], shares[-1].rows[1])),), parts)
    assert {refusal.rule for refusal in verify_schedule(whole).refusals} == {"form"}


def shorter(region: Region) -> Region:
    return replace(region, rows=(region.rows[0], region.rows[1] - 1))


@pytest.mark.parametrize(("function", "most"), [("all_gather", 6), ("reduce_scatter", 5), ("all_reduce", 5)])
def test_a_collective_of_four_times_the_ranks(function: str, most: int):
    """Sixteen times the regions, where they are dealt: what Python does for each is a few steps of a list."""
    small, large = (count_steps(collective(function, ranks)) for ranks in (32, 128))
    assert large < most * small


def collective(function: str, world_size: int) -> Schedule:
    """One collective of a library, of values or of products."""
    operator = {
        "all_gather": "all_gather_matmul",
        "reduce_scatter": "matmul_reduce_scatter",
        "all_reduce": "matmul_all_reduce",
    }[function]
    size = {"m": 2 * world_size, "n": 16, "k": 16 * world_size}
    problem = msgspec.convert({"operator": operator, "world_size": world_size, "dtype": "bfloat16", **size}, Problem)
    return build(f"{operator}.sequential", problem, {}, rank=0).schedule


def test_sets_that_grew_from_one_another_share_what_they_have_in_common():
    schedule = TEMPLATES[0].make(Random(1), 8, 100)
    findings = Findings()
    graph = build_graph(schedule, findings)
    past = past_of(graph, launch_order(graph, findings))
    words = {id(word): sys.getsizeof(word) for done in past.before for word in done}
    assert sum(words.values()) < len(schedule.operations) ** 2 / 8 / 4


def test_a_tall_region_does_not_make_many_look_near():
    steps = WorkBudget(4 * 2000, "looking")
    contents = Contents(steps)
    contents.write(Region("s", 0, (0, 2000), (1, 2)), unknown((2000, 1)), None)
    for at in range(2000):
        region = Region("s", 0, (at, at + 1), (0, 1))
        assert contents.overlapping(region) == []
        contents.write(region, unknown((1, 1)), None)
    assert steps.spent > 0


def count_steps(schedule: Schedule) -> int:
    """Python calls that a proof takes."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        assert verify_schedule(schedule).ok
    finally:
        sys.setprofile(None)
    return calls
