"""In how many files of the package a form is asked for by its name; `python -m tests.test_forms` prints them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.source_tree import PACKAGE, ROOT, modules, nodes

FORMS = ("norm", "gate", "scales", "counted")
MOST_FILES = 10
RECORDS = ("ir/operators/forms.py", "ir/epilogue.py", "ir/counts.py")  # what says what a form is


def names(node: ast.AST) -> Iterator[str]:
    """What a node asks for by a name: an attribute, a keyword, a text."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.keyword):
        yield node.arg or ""
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def asked() -> dict[str, list[str]]:
    """The files that ask for each form, but for the records."""
    found: dict[str, list[str]] = {form: [] for form in FORMS}
    for path in modules().values():
        name = str(path.relative_to(PACKAGE))
        for form in sorted({each for node in nodes(path) for each in names(node)} & set(FORMS)):
            found[form] += [] if name in RECORDS else [name]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_few_files_ask_for_a_form_by_its_name(form: str):
    assert len(asked()[form]) <= MOST_FILES


def test_the_records_are_there():
    assert all((ROOT / "overweave" / each).exists() for each in RECORDS)


if __name__ == "__main__":
    for form, files in asked().items():
        print(f"{form}: asked in {len(files)} files beside its record: {', '.join(files)}")
