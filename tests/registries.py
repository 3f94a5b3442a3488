"""What is registered in a test is forgotten behind it: other tests ask for every operator and method that there is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from overweave.ir.operators.forms import FORMS, REGISTERED
from overweave.ir.operators.registry import OPERATORS
from overweave.ops.dispatch.schema import DEFINED
from overweave.schedules.catalog import catalog
from overweave.schedules.methods.registry import METHODS


@contextmanager
def kept_registries() -> Iterator[None]:
    """Operators, methods, builders and epilogues afterwards are those of before."""
    tables: tuple[Any, ...] = (OPERATORS, METHODS, catalog._BUILDERS, REGISTERED)
    before, forms, ops = [dict(table) for table in tables], [*FORMS], dict(DEFINED)
    try:
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)
        FORMS[:] = forms
        DEFINED.update(ops)  # what was defined meanwhile stays: modules define their ops once
