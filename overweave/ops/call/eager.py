"""Operators under torch.compile: they run as they are, between two graphs, and the compiler does not look inside.

What they do is no tensor algebra: they agree with peers, look addresses up, launch. `fullgraph=True` refuses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")

# Whether torch's compiler reads the code that asks, instead of Python running it.
is_read_by_compiler = torch.compiler.is_dynamo_compiling


def _call(operator: Callable[..., _T], *arguments: Any, **options: Any) -> _T:
    return operator(*arguments, **options)


# `torch.compiler.disable` loads the compiler, a second that most callers need not pay; this loads it when called.
eagerly = torch._disable_dynamo(_call)
