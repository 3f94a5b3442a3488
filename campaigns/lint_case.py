"""One kernel in one configuration, as it is compiled and linted, and what the lists of them share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from overweave.compiler.aot import Source
from overweave.compiler.lint_contract import Contract
from overweave.ir.dtype import FLOAT8, Dtype

DTYPES: dict[Dtype, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
DTYPES_OF_OPERANDS = DTYPES | {FLOAT8: "fp8e4nv"}
OPERANDS = (2, 4, 8)


class Case(NamedTuple):
    """A kernel in one configuration. The configuration's name is `source.config`."""

    source: Source
    contract: Contract


def source_of(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    options: Mapping[str, int],
    label: str,
    divisible: tuple[str, ...] = (),
) -> Source:
    """What is to be compiled. divisible: numbers that are multiples of 16, as all addresses are."""
    aligned = (name for name, kind in signature.items() if kind.startswith("*"))
    return Source(kernel, signature, constexprs, dict.fromkeys((*aligned, *divisible), 16), options, label)
