"""A launch compiles a number that is one in as a constant, not as a tensor: every kernel must compile that way too,
unless it says that none of its numbers are."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from campaigns.lint.lint_cases import cases
from overweave.compiler.aot import Source, compile_kernel


def _one_per_kernel() -> list[Source]:
    """Of those that are given numbers at all."""
    first: dict[str, Source] = {}
    for case in cases():
        first.setdefault(case.source.name, case.source)
    return [source for source in first.values() if _numbers(source)]


def _numbers(source: Source) -> list[str]:
    never = source.kernel.do_not_specialize or ()
    return [name for name, kind in source.signature.items() if kind in ("i32", "i64") and name not in never]


@pytest.mark.slow
@pytest.mark.parametrize("source", _one_per_kernel(), ids=lambda source: source.name)
def test_it_compiles_with_every_number_a_one(source: Source) -> None:
    numbers = _numbers(source)
    signature = {name: kind for name, kind in source.signature.items() if name not in numbers}
    attrs = {name: power for name, power in source.attrs.items() if name not in numbers}
    ones = replace(
        source, signature=signature, constexprs={**source.constexprs, **dict.fromkeys(numbers, 1)}, attrs=attrs
    )
    assert compile_kernel(ones).ptx
