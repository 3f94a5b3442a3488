"""Names of logical tensors that operations derive from others."""

from __future__ import annotations

FACTORS = ("a", "b")  # the tensors of the global matmul
_FINISHED = ".finished"


def all_to_all_result(tensor: str, rank: int) -> str:
    """Return the name of the rows that a rank holds after an all-to-all of `tensor`; each rank's differ."""
    return f"{tensor}.{rank}"


def all_to_all_source(tensor: str) -> str:
    """Return the name of the tensor that was exchanged, of the name of a rank's result."""
    return tensor.split(".")[0]


def scale_of(a: str) -> str:
    """Return the name of the tensor `[rows, 1]` of the scales of the rows of tensor `a`."""
    return f"{a}.scale"


def epilogue_applied(tensor: str) -> str:
    """Return the name of a sum called `tensor` once the epilogue of sums is applied to it."""
    return f"{tensor}{_FINISHED}"


def is_epilogue_applied(tensor: str) -> bool:
    """Whether a tensor's name says so: nothing may be added to it any more."""
    return tensor.endswith(_FINISHED)


def product(a: str, b: str) -> str:
    """Return the name of the tensor that a matmul of tensors `a` and `b` adds to."""
    return f"{a}@{b}"
