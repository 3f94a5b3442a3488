"""Every method by its full name, in order: those of the package, and those that were registered since."""

from __future__ import annotations

from overweave.errors import InputError, nearest
from overweave.schedules.methods import exchanges, finer, gathers, reductions, scatters
from overweave.schedules.methods.record import Method
from overweave.schedules.methods.replaced import REPLACED

METHODS: dict[str, Method] = {
    method.full_name: method
    for method in (
        *(*gathers.METHODS, *finer.GATHERS, *scatters.METHODS, *reductions.METHODS),
        *(*exchanges.METHODS, *finer.EXCHANGES),
    )
}


def register(method: Method) -> None:
    """From now on this method is known. Raises InputError for a name that another one has."""
    if METHODS.setdefault(method.full_name, method) is not method:
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
    """The methods of an operator, in order."""
    return tuple(method for method in METHODS.values() if method.operator == operator)
