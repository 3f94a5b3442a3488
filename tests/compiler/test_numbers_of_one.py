"""A launch compiles a number that is one in as a constant, not as a tensor: every kernel must compile that way too,
unless it says that none of its numbers are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from campaigns.lint.lint_cases import cases
from overweave.lang.arguments import Channel, SymmetricTensor
from tools.aot import Source, compile_kernel

NUMBERS = ("i32", "i64")
SEVERAL = (Channel, SymmetricTensor)


def _one_per_kernel() -> list[Source]:
    """Of those that are given numbers at all; of packed messages, one for each exchange."""
    first: dict[str, Source] = {}
    for case in cases():
        exchange = getattr(case.source.constexprs.get("traits"), "exchange", "")
        first.setdefault(f"{case.source.name} {exchange}", case.source)
    return [source for source in first.values() if _numbers(source)]


def _numbers(source: Source) -> list[str]:
    never = source.kernel.do_not_specialize or ()
    parts = (part for name, kind in source.signature.items() if name not in never for part in _parts(name, kind))
    return [name for name, kind in parts if kind in NUMBERS]


def _parts(name: str, kind: str | tuple[Any, ...]) -> list[tuple[str, Any]]:
    if isinstance(kind, str):
        return [(name, kind)]
    return [(f"{name}.{field}", part) for field, part in kind._asdict().items()]  # type: ignore[attr-defined]


def _with_ones(kind: str | tuple[Any, ...]) -> str | tuple[Any, ...]:
    return kind if isinstance(kind, str) else type(kind)(*(1 if part in NUMBERS else part for part in kind))


@pytest.mark.nightly
def test_it_compiles_with_every_number_a_one() -> None:
    for source in _one_per_kernel():
        numbers = _numbers(source)
        signature = {name: _with_ones(kind) for name, kind in source.signature.items() if name not in numbers}
        alone = [name for name in numbers if name in source.signature]
        attrs = {name: power for name, power in source.attrs.items() if name not in numbers}
        ones = replace(
            source, signature=signature, constexprs={**source.constexprs, **dict.fromkeys(alone, 1)}, attrs=attrs
        )
        assert compile_kernel(ones).ptx, source.name


@pytest.mark.slow
def test_a_tuple_of_a_kernel_is_of_one_subject() -> None:
    """What a kernel is told stands in one place: in no two of its tuples, and not beside them. A tensor descriptor has
    the name of the pointer that it stands for; of channels and of symmetric tensors a kernel may have several."""
    for source in _one_per_kernel():
        kinds = {name: kind for name, kind in source.signature.items() if not str(kind).startswith("tensordesc")}
        told = [*(name for name, kind in kinds.items() if not isinstance(kind, tuple))]
        tuples = [kind for kind in kinds.values() if isinstance(kind, tuple) and not isinstance(kind, SEVERAL)]
        told += [field for kind in tuples for field in kind._fields]  # type: ignore[attr-defined]
        assert [name for name, count in Counter(told).items() if count > 1] == [], source.name
