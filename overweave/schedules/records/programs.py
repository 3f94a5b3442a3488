"""Plans that are programs of their own, and no methods of an operator of matmuls: families of them, by name."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from overweave.errors import InputError, nearest


class Programs(Struct, frozen=True):
    """Operators that have all of some plans. subject: what commands call them. plans: plan -> summary."""

    subject: str
    operators: tuple[str, ...]
    plans: Mapping[str, str]

    def names(self) -> tuple[str, ...]:
        """Return every schedule: `OPERATOR.PLAN`."""
        return tuple(f"{operator}.{plan}" for operator in self.operators for plan in self.plans)

    def has(self, name: str) -> bool:
        """Whether a schedule's name begins with one of the operators."""
        return name.partition(".")[0] in self.operators

    def operator_and_plan(self, name: str) -> tuple[str, str]:
        """Return the parts of a name. Raises InputError for one that is none."""
        if name not in self.names():
            cure = nearest("Schedules", name, self.names(), "overweave show")
            raise InputError(f"schedule {name[:60]}", "there is none of this name", cure)
        operator, _, plan = name.partition(".")
        return operator, plan
