"""What is registered in a test is forgotten behind it: other tests ask for every operator and method that there is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from overweave.ir.operators.registry import OPERATORS
from overweave.schedules.catalog import catalog
from overweave.schedules.methods.registry import METHODS


@contextmanager
def kept_registries() -> Iterator[None]:
    """Operators, methods and builders afterwards are those of before."""
    tables: tuple[Any, ...] = (OPERATORS, METHODS, catalog._BUILDERS)
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)
