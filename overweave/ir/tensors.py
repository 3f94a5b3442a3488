"""Names of logical tensors: of what becomes of others."""

from __future__ import annotations

FACTORS = ("a", "b")  # the tensors of the global matmul
_FINISHED = ".finished"


def received(tensor: str, rank: int) -> str:
    """Name of what a rank holds after an all-to-all of `tensor`: every rank has one of its own."""
    return f"{tensor}.{rank}"


def exchanged(tensor: str) -> str:
    """Name of what was exchanged, given that of what a rank holds of it."""
    return tensor.split(".")[0]


def scale_of(a: str) -> str:
    """Name of the tensor `[rows, 1]` that holds what each row of tensor `a` is to be multiplied by."""
    return f"{a}.scale"


def finished(tensor: str) -> str:
    """Name of what becomes of a sum called `tensor` once it is given what an epilogue does to sums."""
    return f"{tensor}{_FINISHED}"


def is_finished(tensor: str) -> bool:
    """Whether a tensor is called so: nothing may be added to it any more."""
    return tensor.endswith(_FINISHED)


def product(a: str, b: str) -> str:
    """Name of the tensor that a matmul of tensors `a` and `b` adds to."""
    return f"{a}@{b}"
