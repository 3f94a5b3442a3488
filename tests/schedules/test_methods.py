"""The records of methods: what they say is so of the schedules they write, and nothing else knows one by its name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from msgspec.structs import fields, replace

from overweave.errors import InputError
from overweave.ir.epilogue import Norm
from overweave.ir.exchange import addresses_peers
from overweave.ir.plan import LIBRARY, Plan
from overweave.ir.problem import Problem
from overweave.ir.schedule import OUTPUT, Compute
from overweave.ir.verify.plan import MachineLimits, verify_plan
from overweave.schedules.catalog.catalog import build
from overweave.schedules.methods.registry import METHODS, REPLACED, method_of, register
from overweave.schedules.records.record import Adds, MarginCase, Method, MethodInputs
from tests.source_tree import compared, modules, nodes

RECORDS = (  # of operators, of what torch brings, of authors' kernels
    "overweave.schedules.methods.",
    "overweave.schedules.records.outside",
    "overweave.schedules.weave.transports",
)
# Where words that are methods' names mean something else: how packed messages are exchanged, operations of Triton, rows
# that `bench` compares.
# Files that follow the calls of an author's kernel, of which `tl.scatter` is one.
FOLLOWERS = ("addresses.access", "loop_carried", "walk.evaluate", "walk.follow", "source.language", "rectangles")
EXCHANGES = {"scatter", "two_shot"}
OTHER_WORDS = {
    "overweave.lower.writer": {"synth"},  # a path by which steps of other compilers are written
    **{f"overweave.compiler.frontend.{name}": {"scatter"} for name in FOLLOWERS},
    "overweave.kernels.packed.exchange": EXCHANGES,
    "overweave.schedules.records.record": {"ring"},  # an order in which parts are added
    "overweave.ir.plan": {"two_shot"},
    "overweave.ir.verify.engines.packed": EXCHANGES,
    "overweave.memory.layout": {"two_shot"},
    "overweave": {"islands"},  # of ranks, in the table of public names
    # How keys and values travel.
    "overweave.attention.plans": {"sequential", "double_ring", "per_shard"},
    "overweave.attention.predicted": {"sequential", "per_shard"},
    "overweave.attention.schedules": {"sequential", "double_ring", "per_shard"},
    "overweave.schedules.records.attention": {"sequential", "ring", "double_ring", "per_shard"},
    "overweave.tuner.measure.ways": {"sequential"},  # of layers
    **{f"overweave.moe.{name}": {"push"} for name in ("overlapped", "tensor_parallel")},  # how layers overlap
    "overweave.moe.schedules": {"sequential", "scatter"},
    "overweave.schedules.records.experts": {"sequential", "push"},
    "overweave.moe.dispatch": {"sequential", "push"},  # how tokens travel to experts of other ranks
    "overweave.moe.programs": {"scatter"},  # half of a layer
    "overweave.tuner.calibrate.machine_file": {"push"},  # a curve of a machine file
    "overweave.tuner.measure.bench": {"sequential"},
}
RING_ORDER = re.compile(r"\border (==|!=) 'ring'")  # the value of an option, and of how a method adds
NAMES = {method.name for method in METHODS.values()}


def planned(name: str, world_size: int = 4, **changes: object) -> Plan:
    problem = Problem(operator=name.partition(".")[0], m=512, n=64, k=48, world_size=world_size, dtype="bfloat16")
    return build(name, replace(problem, **changes), {})


@pytest.mark.parametrize("name", METHODS)
def test_a_record_says_whether_its_schedule_addresses_the_memory_of_peers(name: str):
    method = METHODS[name]
    for options in ({}, {"carrier": "library"} if method.takes("carrier") else {}):
        schedule = build(name, planned(name).problem, options).schedule
        assert method.addresses_peers(options) == addresses_peers(schedule)


@pytest.mark.parametrize("name", METHODS)
def test_a_record_says_which_engines_drive_its_schedule(name: str):
    method, plan = METHODS[name], planned(name)
    driven = {assigned.engine for assigned in plan.realization.engines}
    # Copies inside a rank are the caller's stream's, as the library's work is.
    assert driven - {LIBRARY} == method.engines - {LIBRARY}
    assert LIBRARY in driven or LIBRARY not in method.engines
    assert plan.schedule.reuse == method.reuse


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.adds])
def test_a_record_says_in_which_order_sums_are_added(name: str):
    for world_size in (2, 3, 4):
        check_order(name, world_size)


def check_order(name: str, world_size: int) -> None:
    adds, plan = METHODS[name].adds, planned(name, world_size)
    assert adds is not None
    orders = {tuple(lo // 48 for lo, _ in goal.terms) for goal in plan.schedule.goal}
    by_rank = tuple(range(world_size))
    assert {goal.unordered for goal in plan.schedule.goal} == {adds.order == "arrival"}
    if adds.order == "ring":
        assert orders == {tuple((owner + hop) % world_size for hop in range(1, world_size + 1)) for owner in by_rank}
    elif adds.order == "ways":
        assert {tuple(sorted(order)) for order in orders} == {by_rank}
    else:
        assert orders == {by_rank}
    verdict = verify_plan(plan, MachineLimits())
    assert verdict.ok
    # Two parts are one addition, and islands of one rank add nothing inside.
    is_rounded = adds.precision == "result" and world_size > 2 and not (METHODS[name].has_levels and world_size % 2)
    assert any("each addition rounds them" in note for note in verdict.notes) == is_rounded
    exact = replace(plan, realization=replace(plan.realization, partial_sums="float32"))
    assert {each.rule for each in verify_plan(exact, MachineLimits()).refusals} == (
        {"rounding"} if is_rounded else set()
    )


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.norms])
def test_a_record_says_which_engine_norms(name: str):
    plan = planned(name, norm=Norm(eps=1e-5, residual=True))
    outputs = {buffer.name for buffer in plan.schedule.buffers if buffer.home == OUTPUT}
    last = (each for each in plan.schedule.operations if not isinstance(each, Compute))
    queues = {each.queue for each in last if any(part.buffer in outputs for part in each.writes)}
    assert {plan.realization.engine_of(queue) for queue in queues} == {METHODS[name].norms}


def test_a_method_is_registered_once_and_what_is_gone_names_another():
    push = method_of("all_gather_matmul.push")
    register(push)
    with pytest.raises(InputError, match="a name of its own"):
        register(replace(push, summary="another"))
    for gone, instead in REPLACED.items():
        assert gone not in METHODS
        assert method_of(f"{gone.partition('.')[0]}.{instead}")
        with pytest.raises(InputError, match=f"Use {instead}"):
            method_of(gone)


def test_options_of_grids_and_of_margins_are_the_methods_own():
    for method in METHODS.values():
        asked = [option for grid in method.grids for option in grid]
        asked += [option for case in method.margins for option in case.options]
        assert all(method.takes(option) for option in asked), method.full_name


def test_no_boolean_of_a_record_is_true_of_one_method_alone():
    """A fact about one method is a value that others could have."""
    found: Counter[str] = Counter()
    for method in METHODS.values():
        for record in (method, method.adds, *method.margins, *method.needs):
            stated = [] if record is None else [field.name for field in fields(type(record))]
            found.update(f"{type(record).__name__}.{name}" for name in stated if getattr(record, name) is True)
        own = (name for name in vars(Method) if isinstance(vars(Method)[name], property))
        found.update(f"Method.{name}" for name in own if getattr(method, name) is True)
    assert found
    assert [name for name, count in found.items() if count == 1] == []


def words_of(node: ast.AST, constants: dict[str, set[str]]) -> set[str]:
    """Names of methods that an expression is, or that a tuple, list or set of it holds."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value.rpartition(".")[2]} & NAMES
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return set().union(*(words_of(each, constants) for each in node.elts))
    return constants.get(node.id, set()) if isinstance(node, ast.Name) else set()


def constants_of(nodes: Iterable[ast.AST]) -> dict[str, set[str]]:
    """Constants that stand for methods' names, anywhere."""
    known: dict[str, set[str]] = {}
    for assigned in (node for node in nodes if isinstance(node, ast.Assign)):
        for target, value in _pairs(assigned):
            if isinstance(target, ast.Name) and target.id.isupper() and (words := words_of(value, {})):
                known.setdefault(target.id, set()).update(words)
    return known


def _pairs(assigned: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in assigned.targets:
        if isinstance(target, ast.Tuple) and isinstance(assigned.value, ast.Tuple):
            yield from zip(target.elts, assigned.value.elts, strict=False)
        else:
            yield target, assigned.value


def offences(
    nodes: Iterable[ast.AST], constants: dict[str, set[str]], others: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Where a method's name is compared with, searched in, matched against, or the key of a table, or a part of one is
    looked for at an end of something.
    """
    for each, parts in compared(nodes):
        words = {word for part in parts for word in words_of(part, constants)}
        if isinstance(each, ast.Call):
            words |= {text for arg in each.args for text in ends_of(arg)}
        if words - others and not RING_ORDER.search(ast.unparse(each)):
            yield ast.unparse(each)[:100]


def ends_of(node: ast.AST) -> Iterator[str]:
    """Texts with which a method's name begins or ends."""
    texts = node.elts if isinstance(node, ast.Tuple) else [node]
    for text in (each.value for each in texts if isinstance(each, ast.Constant) and isinstance(each.value, str)):
        if len(text) > 3 and any(name.startswith(text) or name.endswith(text) for name in NAMES):
            yield text


@pytest.mark.slow
def test_nobody_asks_for_a_method_by_its_name():
    asked = {name: nodes(path) for name, path in modules().items() if not name.startswith(RECORDS)}
    constants = constants_of(node for each in asked.values() for node in each)

    def found(name: str, others: Iterable[str]) -> list[str]:
        return list(offences(asked[name], constants, frozenset(others)))

    assert not {name: where for name in asked if (where := found(name, OTHER_WORDS.get(name, ())))}
    left_out = ((name, word) for name, words in OTHER_WORDS.items() for word in words)
    assert not [(name, word) for name, word in left_out if not found(name, OTHER_WORDS[name] - {word})], "without need"


@pytest.mark.parametrize(
    "code",
    [
        'what.plan == "ring_stored"',
        'STORED = ("ring_stored", "scatter_stored")\nx = plan in STORED',
        'A, B = "push", "pull"\nx = plan != B',
        'method.name.endswith("packed")',
        'name.startswith(("one_shot", "whole"))',
        'match plan:\n    case "push":\n        pass',
        '{"push": 1}[plan]',
        '"matmul_all_reduce.two_shot" == name',
        'plan == "ring"',
    ],
)
def test_who_asked_would_be_seen(code: str):
    parsed = list(ast.walk(ast.parse(code)))
    assert list(offences(parsed, constants_of(parsed)))


def test_an_options_value_is_no_methods_name():
    assert not list(offences(ast.walk(ast.parse('split.order == "ring"')), {}))


def test_a_margin_holds_where_its_case_does():
    problem = Problem(operator="matmul_all_reduce", m=512, n=64, k=48, world_size=2, dtype="bfloat16")
    ring = METHODS["matmul_all_reduce.ring_stored"]
    of_two, of_four = (ring.margin(replace(problem, world_size=ranks), {}) for ranks in (2, 4))
    assert of_two.us < of_four.us
    case = MarginCase(margin=of_two, ranks=2, options={"pieces": 2})
    assert case.holds(problem, {"pieces": 2})
    assert not case.holds(problem, {"pieces": 1})
    assert not case.holds(replace(problem, world_size=3), {"pieces": 2})


def test_a_record_without_kernels_and_sums_is_the_librarys():
    plain = Method(operator="o", name="n", summary="")
    assert (plain.is_plain, plain.has_kernels, plain.engines) == (True, False, {LIBRARY})
    assert replace(plain, adds=Adds("reduce_kernel")).has_kernels
    assert MethodInputs.__struct_fields__[0] == "problem"
