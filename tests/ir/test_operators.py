"""The records of operators, and that nothing but a record knows an operator by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import pytest
from msgspec import json

from overweave.errors import InputError
from overweave.ir.operators.registry import OPERATORS, operator_of, record_of
from overweave.ir.problem import Problem
from tests.source_tree import compared, modules, nodes

# Files that may hold a table by operators' names: what else they know of one is nobody's fact but theirs.
TABLES = {
    "overweave": "the public names",
    "overweave.tuner.space.space": "which schedules of an operator are tried, in which grid",
}


def is_name(node: ast.AST, constants: set[str]) -> bool:
    """Whether an expression is an operator's name, or a tuple, list or set that holds one."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value.partition(".")[0] in OPERATORS
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(is_name(each, constants) for each in node.elts)
    if isinstance(node, ast.Attribute):
        return node.attr == "name" and ast.unparse(node.value).endswith("OPERATOR")
    return isinstance(node, ast.Name) and node.id in constants


def constants_of(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that stand for an operator's name anywhere."""
    assigned = (node for node in nodes if isinstance(node, ast.Assign))
    return {
        target.id
        for node in assigned
        if is_name(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def offences(nodes: Iterable[ast.AST], constants: set[str], has_table: bool = False) -> Iterator[str]:
    """Where an operator's name is compared with, searched in, matched against, or the key of a table."""
    for each, parts in compared(nodes):
        if isinstance(each, ast.Dict) and has_table:
            continue
        if any(is_name(part, constants) for part in parts):
            yield ast.unparse(each)[:100]


@pytest.mark.slow
def test_nobody_asks_for_an_operator_by_its_name():
    asked = {name: nodes(path) for name, path in modules().items() if not name.startswith("overweave.ir.operators.")}
    constants = constants_of(node for each in asked.values() for node in each)
    found = {f"{name}: {where}" for name in asked for where in offences(asked[name], constants, name in TABLES)}
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        'problem.operator == "all_gather_matmul"',
        'GATHER = "all_gather_matmul"\nx = name != GATHER',
        'name in ("matmul_all_reduce", "other")',
        'name.startswith("matmul_all_reduce.")',
        'match name:\n    case "matmul_reduce_scatter":\n        pass',
        "all_gather_matmul.OPERATOR.name == name",
        '{"matmul_all_reduce": 1}[name]',
    ],
)
def test_who_asked_would_be_seen(code: str):
    parsed = list(ast.walk(ast.parse(code)))
    assert list(offences(parsed, constants_of(parsed)))


def test_what_the_records_say():
    gather, scatter, reduce, exchange, back = OPERATORS.values()
    assert [record.name for record in OPERATORS.values()] == list(OPERATORS)
    assert (gather.gathers, gather.adds, gather.has_row_shards, gather.scatters) == (True, False, True, False)
    assert (scatter.gathers, scatter.adds, scatter.has_row_shards, scatter.scatters) == (False, True, False, True)
    assert (reduce.gathers, reduce.adds, reduce.scatters, reduce.shares_sums) == (False, True, False, True)
    assert (exchange.gathers, exchange.exchanges, exchange.has_row_shards, exchange.scatters) == (
        True,
        True,
        False,
        False,
    )
    assert [record.parts(4) for record in OPERATORS.values()] == [
        {"m": 1, "n": 4, "k": 1},
        {"m": 1, "n": 1, "k": 4},
        {"m": 1, "n": 1, "k": 4},
        *({"m": 1, "n": 1, "k": 1},) * 2,
    ]
    assert (back.gathers, back.exchanges, back.adds, back.scatters) == (False, True, False, False)
    assert [record.name for record in OPERATORS.values() if record.forms.norm] == [scatter.name, reduce.name]


def test_an_unknown_operator_is_refused_by_all_names_and_an_authors_kernel_is_none():
    with pytest.raises(InputError, match=", ".join(OPERATORS)):
        operator_of("matmul")
    assert not record_of("an_authors_kernel").adds


def test_where_a_ranks_shard_begins():
    sizes = {"m": 10, "n": 24, "k": 16, "world_size": 4, "dtype": "bfloat16"}
    gather, scatter, *_ = (Problem(operator=name, **sizes) for name in OPERATORS)
    assert [gather.start(gather.record.x, rank) for rank in range(4)] == [(0, 0), (3, 0), (6, 0), (9, 0)]
    assert gather.start(gather.record.w, 2) == (0, 48)
    assert (scatter.start(scatter.record.x, 2), scatter.start(scatter.record.w, 2)) == ((0, 32), (32, 0))


def test_a_problem_is_written_as_ever():
    """Shipped tables, caches and plan files hold problems in this form."""
    problem = Problem(operator="all_gather_matmul", m=1, n=2, k=3, world_size=4, dtype="bfloat16")
    beside = ["b_is_transposed", "returns_gathered", "epilogue", "norm", "columns", "out_dtype", "counted", "strip"]
    keys = ["operator", "m", "n", "k", "world_size", "dtype", *beside]
    assert list(json.decode(json.encode(problem))) == keys
