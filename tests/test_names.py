"""One name, one meaning: no two rooms give one name to different records."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.source_tree import modules, tree

# What torch, Transformers and Megatron call it is what their adapters call it; a move that an author lists (public, in
# schedules/moves) is called as the operation that it becomes (in ir/schedule.py).
TWICE = {"Colwise", "Rowwise", "ColumnParallelLinear", "RowParallelLinear", "Put", "Get", "Collective"}


def records(path: Path) -> dict[str, str]:
    """The classes and type aliases of a file: a class by the file, an alias by what it stands for."""
    found: dict[str, str] = {}
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found[node.name] = str(path)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper():
                found[name] = ast.unparse(node.value).replace("Mapping[", "dict[").replace("torch.Tensor", "Tensor")
    return found


def test_a_name_of_a_record_has_one_meaning():
    meanings: dict[str, set[str]] = defaultdict(set)
    for path in modules().values():
        for name, meaning in records(path).items():
            meanings[name].add(meaning)
    assert {name for name, several in meanings.items() if len(several) > 1} == TWICE
