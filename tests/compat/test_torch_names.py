"""Torch's private names stand in one file, and each is there in the torch at hand."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import torch
from torch.autograd import forward_ad

from overweave.compat import torch_names
from overweave.compat.versions import Home
from overweave.errors import MachineError
from tests.source_tree import ROOT, nodes

COMPAT = ROOT / "overweave" / "compat"
PRODUCT = [path for path in sorted((ROOT / "overweave").rglob("*.py")) if COMPAT not in path.parents]


def of_torch(tree: list[ast.AST]) -> dict[str, str]:
    """By the names that a file gives to modules and members of torch, what they are."""
    known = {}
    for node in tree:
        if isinstance(node, ast.Import):
            for each in node.names:
                known[each.asname or each.name.split(".")[0]] = each.name if each.asname else each.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return {name: what for name, what in known.items() if what.split(".")[0] == "torch"}


def spelled(tree: list[ast.AST]) -> Iterator[str]:
    """Every dotted name of torch that a file imports or reads, from its first module on."""
    known = of_torch(tree)
    yield from known.values()
    for node in tree:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in known:
                yield f"{known[first]}.{rest}"


def private(tree: list[ast.AST]) -> set[str]:
    parts = ((name, name.split(".")) for name in spelled(tree))
    return {
        name
        for name, (first, *others) in parts
        if first == "torch" and any(one.startswith("_") and not one.startswith("__") for one in others)
    }


def test_private_names_of_torch_are_spelled_in_one_file() -> None:
    found = {str(path.relative_to(ROOT)): names for path in PRODUCT if (names := private(nodes(path)))}
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._get_tracing_state()",
        "import torch.distributed as dist\ndist.distributed_c10d._world",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "from torch._inductor import config",
        "import torch.distributed._symmetric_memory as memory",
        "from torch.utils import _pytree as tree",
        "def late():\n    import torch._dynamo",
    ],
)
def test_each_way_to_spell_one_would_be_seen(source: str) -> None:
    assert private(list(ast.walk(ast.parse(source))))


@pytest.mark.parametrize("source", ["import torch\ntorch.__version__", "import torch\ntorch.cuda.Event", "a._torch"])
def test_what_is_public_or_not_torchs_is_let_through(source: str) -> None:
    assert not private(list(ast.walk(ast.parse(source))))


@pytest.mark.slow  # it imports torch's compiler
def test_every_name_is_there() -> None:
    for name in (*torch_names.NAMES, *torch_names.VALUES):
        assert getattr(torch_names, name) is not None, name
    if torch.version.cuda:
        assert all(getattr(torch_names, name) is not None for name in torch_names.OF_CUDA)


def test_names_are_not_given_twice() -> None:
    tables = (torch_names.NAMES, torch_names.OF_CUDA, torch_names.VALUES)
    listed = [path for table in tables for homes in table.values() for path in homes]
    assert len(set().union(*tables)) == sum(map(len, tables))
    assert len(set(listed)) == len(listed)
    paths = (torch_names._PATHS, torch_names._PATHS_OF_CUDA, torch_names._PATHS_OF_VALUES)
    assert sum(len(each) for table in paths for each in table.values()) == len(listed) - 4  # the two that moved


def test_a_value_is_read_anew() -> None:
    assert torch_names.current_level() == -1
    with forward_ad.dual_level():
        assert torch_names.current_level() == 0
    assert torch_names.current_level() == -1


def test_a_name_that_is_nowhere_is_said_with_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_names.NAMES, "gone", (Home("2.10 on", "torch", "_nowhere"),))
    with pytest.raises(MachineError, match=r"torch 2.* has none of torch\._nowhere \(2\.10 on\)\. Use a torch from"):
        _ = torch_names.gone
    with pytest.raises(AttributeError):
        _ = torch_names.unheard_of
