"""Every operator by its name, in order: those of the package, and those that were registered since."""

from __future__ import annotations

from overweave.errors import InputError
from overweave.ir.operators import (
    all_gather_matmul,
    all_to_all_matmul,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)
from overweave.ir.operators.record import CallMatrix, Operator, SizeRule

OPERATORS: dict[str, Operator] = {
    record.name: record
    for record in (
        all_gather_matmul.OPERATOR,
        matmul_reduce_scatter.OPERATOR,
        matmul_all_reduce.OPERATOR,
        all_to_all_matmul.OPERATOR,
        matmul_all_to_all.OPERATOR,
    )
}
LOCAL = Operator(
    name="",
    summary="x @ w",
    x=CallMatrix("x", ("m", "k"), "replicated"),
    w=CallMatrix("w", ("k", "n"), "replicated"),
    y=CallMatrix("y", ("m", "n"), "replicated"),
    split=None,
    reference=lambda tensors, by: by.matmul(tensors["x"], tensors["w"]),
    size_rule=SizeRule("", ""),
)


def register(record: Operator) -> None:
    """Add an operator. Raises InputError if another one has its name."""
    if OPERATORS.setdefault(record.name, record) is not record:
        raise InputError(f"register {record.name}", "there is such an operator", "Give it a name of its own")


def operator_of(name: str, request: str = "operator") -> Operator:
    """Return the operator called `name`. request: what the error says was asked for. Raises InputError that lists all
    names."""
    if name not in OPERATORS:
        reason, cure = "there is no such operator", f"Operators: {', '.join(OPERATORS)}"
        raise InputError(f"{request} {str(name)[:60]}", reason, cure)
    return OPERATORS[name]


def record_of(name: str) -> Operator:
    """Return the operator of a Problem. If it names none (an author's kernel, a single matmul): a local matmul."""
    return OPERATORS.get(name, LOCAL)


def names_with_form(form: str) -> str:
    """Return the operators that have a form, by its field of `Forms`, for messages such as `Only X can`."""
    return ", ".join(name for name, record in OPERATORS.items() if getattr(record.forms, form))
