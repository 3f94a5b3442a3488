"""Every method, in order: those of the package, and those that were registered since.

Operators' methods stand under their full names. Of a tensor of an author's kernel it is a transport: one of those, or
one that such kernels alone have.
"""

from __future__ import annotations

from overweave.errors import InputError, nearest
from overweave.ir.operators import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from overweave.ir.plan import AUTHOR_KERNEL
from overweave.schedules.families import finer
from overweave.schedules.methods import authored, exchanges, gathers, reductions, synthesized
from overweave.schedules.records.record import Method

AUTHORED: dict[str, Method] = {method.full_name: method for method in authored.METHODS}
METHODS: dict[str, Method] = {
    method.full_name: method
    for method in (
        *(*gathers.METHODS, *finer.GATHER_METHODS, *reductions.METHODS),
        *(*exchanges.METHODS, *finer.EXCHANGE_METHODS),
        *synthesized.METHODS,
    )
}


def register(method: Method) -> None:
    """From now on this method is known. Raises InputError for a name that another one has."""
    table = AUTHORED if method.multiplies == AUTHOR_KERNEL else METHODS
    if table.setdefault(method.full_name, method) is not method:
        raise InputError(f"register {method.full_name}", "there is such a method", "Give it a name of its own")


def method_of(name: str) -> Method:
    """The method called `name`, its operator before it. Raises InputError that names the nearest."""
    if name in REPLACED:
        raise InputError(f"schedule {name}", "it is gone", f"Use {REPLACED[name]} in its place")
    if name not in METHODS:
        own = [method.full_name for method in methods_for(str(name).partition(".")[0])]
        cure = nearest("Schedules", name, own or METHODS, "overweave show")
        raise InputError(f"schedule {str(name)[:80]}", "unknown", cure)
    return METHODS[name]


def methods_for(operator: str) -> tuple[Method, ...]:
    return tuple(method for method in METHODS.values() if method.operator == operator)


# Schedules and options that are gone: what a caller is told, and what is skipped in files that were measured.

_AG, _RS, _AR = (each.OPERATOR.name for each in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce))
# With the method that does their work: no shipped table had a row that any of them won.
REPLACED: dict[str, str] = {
    f"{_AG}.gather": "per_shard",
    f"{_AG}.gather_pull": "gather_packed",
    f"{_RS}.pull": "scatter_pull",
    f"{_RS}.ring": "fused_ring",
    f"{_AR}.one_shot": "one_shot_packed",
    f"{_AR}.one_shot_pull": "one_shot_packed",
    f"{_AR}.two_shot_pull": "two_shot",
    f"{_AR}.two_shot_stored": "ring_stored",
}
REPLACED_OPTIONS = ("sharing", "split_k")  # of rows in files that were measured with them
