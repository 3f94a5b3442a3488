"""The classes and functions that the registry names by text are there."""

from __future__ import annotations

import ast

from overweave.runtime.backends import BACKENDS
from tests.source_tree import modules, tree


def test_every_back_end_is_defined_where_the_registry_says():
    for backend, path in BACKENDS.items():
        module, name = path.split(":")
        defined = {
            node.name for node in tree(modules()[module]).body if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        assert name in defined, backend
