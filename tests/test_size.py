"""Budgets on the shape of the code. A budget is raised in the change that needs it, in the open."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import overweave
import overweave.moe
from overweave.kernels import arguments
from overweave.memory import split_k
from tests.source_tree import ROOT, modules, nodes, tree

FILE_LINES = 600
HOST_FUNCTION_LINES = 60
DEVICE_FUNCTION_LINES = 120
PUBLIC_PARAMETERS = 8
PUBLISHED, PUBLISHED_IN_ORDER = {*overweave.__all__, *overweave.moe.__all__}, 5
KERNEL_ENTRIES = 24  # tensor descriptors not counted
TUPLE_FIELDS = 12
# What a kernel takes in front as tensor descriptors, which Triton 3.6 does not launch inside tuples.
DESCRIPTORS = re.compile(r"(a_shard|a_workspace|b|out|addend_tiles|total_tiles|tiles|sums)(_\d)?")
TAKES_DESCRIPTORS = {"matmul_kernel": 5, "matmul_hopper_kernel": 24}
FORBIDDEN_STEMS = ("utils", "util", "helpers", "misc", "common")
FORBIDDEN_ENDINGS = ("_v1", "_v2", "_v3", "_new", "_old", "_copy")
Function = ast.FunctionDef | ast.AsyncFunctionDef

EVERYTHING = sorted(
    path
    for folder in ("overweave", "tools", "tests", "campaigns", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
)


def functions(path: Path) -> Iterator[Function]:
    return (node for node in nodes(path) if isinstance(node, Function))


def is_device(function: Function) -> bool:
    """Decorated by `@triton.jit`, `@jit` or `@gluon.jit`, with or without arguments."""
    return any("jit" in ast.unparse(decorator).split("(")[0].split(".") for decorator in function.decorator_list)


def too_long(function: Function) -> bool:
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    return lines > HOST_FUNCTION_LINES and (lines > DEVICE_FUNCTION_LINES or not is_device(function))


def parameters(function: Function) -> int:
    arguments = function.args
    named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


def is_command(path: Path, function: Function) -> bool:
    """A typer command, named after its file: its parameters are the options of a command line."""
    return path.parent.name == "commands" and function.name == path.stem


def is_overload(function: Function) -> bool:
    """One of the forms of a function that follows."""
    return any(ast.unparse(decorator) == "overload" for decorator in function.decorator_list)


def test_files_stay_small():
    assert not [path for path in EVERYTHING if len(path.read_text().splitlines()) > FILE_LINES]


def test_functions_stay_small():
    long = [f"{path}:{f.lineno} {f.name}" for path in EVERYTHING for f in functions(path) if too_long(f)]
    assert not long


def is_published(path: Path, function: Function) -> bool:
    """Called by users in the words of torch: few parameters have an order, and each keyword is a form of the call."""
    is_named = function.name in PUBLISHED or path == modules()["overweave.functional"]
    return is_named and len(function.args.posonlyargs + function.args.args) <= PUBLISHED_IN_ORDER


def test_public_functions_take_few_parameters():
    heavy = [
        f"{path}:{f.lineno} {f.name}"
        for path in modules().values()
        for f in functions(path)
        if parameters(f) > PUBLIC_PARAMETERS and not f.name.startswith("_")
        if not (is_device(f) or is_command(path, f) or is_overload(f) or is_published(path, f))
    ]
    assert not heavy


def kernels() -> Iterator[Function]:
    """What is launched: device functions whose names end so."""
    every = (function for path in modules().values() for function in functions(path))
    return (function for function in every if function.name.endswith("_kernel") and is_device(function))


def entries(kernel: Function) -> int:
    """Of its signature, without tensor descriptors."""
    return parameters(kernel) - TAKES_DESCRIPTORS.get(kernel.name, 0)


def test_kernels_take_few_entries():
    taken = {kernel.name: entries(kernel) for kernel in kernels()}
    assert TAKES_DESCRIPTORS.keys() <= taken.keys()
    assert not {name: count for name, count in taken.items() if count > KERNEL_ENTRIES}


def test_what_counts_as_a_descriptor_is_named_like_one():
    for kernel in kernels():
        first = [argument.arg for argument in kernel.args.args][: TAKES_DESCRIPTORS.get(kernel.name, 0)]
        assert all(DESCRIPTORS.fullmatch(name) for name in first), kernel.name


def test_tuples_of_kernels_have_few_fields():
    known = [each for module in (arguments, split_k) for each in vars(module).values() if hasattr(each, "_fields")]
    assert {arguments.LaunchTiles, split_k.Shares} <= {*known}
    assert not [each for each in known if len(each._fields) > TUPLE_FIELDS]


def test_no_junk_drawers_and_no_second_versions():
    assert not [path for path in EVERYTHING if path.stem in FORBIDDEN_STEMS or path.stem.endswith(FORBIDDEN_ENDINGS)]


FACES = ("overweave", "overweave.moe", "overweave.attention", "overweave.lower")  # packages whose names callers use


def test_sub_packages_hold_nothing_but_a_docstring():
    for name, path in modules().items():
        if path.name == "__init__.py" and name not in FACES:
            assert len(tree(path).body) == 1, name
            assert ast.get_docstring(tree(path)), f"{name} does not say who lives there"


def test_a_breach_would_be_seen():
    long = ast.parse("def f():\n" + "    x = 1\n" * (HOST_FUNCTION_LINES + 1)).body[0]
    wide = ast.parse("def f(a, b, c, d, e, f, *, g, h, i): pass").body[0]
    device = ast.parse("@triton.jit(do_not_specialize=['epoch'])\ndef f(): pass").body[0]
    assert too_long(long)
    assert parameters(wide) == 9
    assert is_device(device)
    crowded = ast.parse(f"def f({', '.join(f'a{n}' for n in range(KERNEL_ENTRIES + 1))}): pass").body[0]
    assert entries(crowded) > KERNEL_ENTRIES
