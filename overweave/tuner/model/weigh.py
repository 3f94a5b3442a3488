"""What a model says of candidates, whatever they are: each is asked for once, family by family, option by option."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from math import inf
from typing import Any, Generic, Literal, Protocol, TypeVar

from msgspec import Struct

from overweave.errors import OverweaveError
from overweave.ir.pause_gc import without_collection

MOST_DESCENTS = 6  # families whose further members are looked at, the quickest first
WORSE = 1.01  # times the best value of an option, behind which no further value is looked at
REACH = 1.2  # how far behind the quickest the first of a family may be for the others to be looked at
State = Literal["measured", "simulated", "impossible", "unknown"]
C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


class Weighed(Struct, Generic[C], frozen=True):
    """What is known of a candidate: its time by the model and as measured, or why it cannot be; nothing where it can
    only be measured, and was not.
    """

    candidate: C
    predicted_us: float | None = None
    obstacle: str = ""
    measured_us: float | None = None

    @property
    def way(self) -> C:
        """The candidate, by the name that what `compile_auto` returns has for it."""
        return self.candidate

    @property
    def us(self) -> float:
        """The predicted time; infinite where there is none."""
        return inf if self.predicted_us is None else self.predicted_us

    @property
    def state(self) -> State:
        """What is known of it."""
        if self.obstacle:
            return "impossible"
        if self.measured_us is not None:
            return "measured"
        return "unknown" if self.predicted_us is None else "simulated"

    def line(self, width: int) -> str:
        """The candidate, padded to a width, and what is known."""
        times = (("predicted", self.predicted_us), ("measured", self.measured_us))
        told = ", ".join(f"{word} {us:.1f} us" for word, us in times if us is not None)
        return f"{self.candidate!s:{width}s}  {f'not: {self.obstacle}' if self.obstacle else told or 'nothing known'}"


class CandidateFamily(Protocol[C_co]):
    """Candidates that differ in the values of options."""

    @property
    def grid(self) -> Mapping[str, tuple[Any, ...]]: ...

    def member(self, options: Mapping[str, Any]) -> C_co: ...


class Model(Generic[C]):
    """Asks for every candidate at most once. known: in the order of asking.

    predict: microseconds, or None where nobody can tell, or where more than a limit is all that need be known; raises
    OverweaveError for what cannot be. obstacle: why a candidate cannot be, or empty. handicap: microseconds that the
    library's is given ahead of a candidate.
    """

    def __init__(
        self,
        predict: Callable[[C, float], float | None],
        obstacle: Callable[[C], str] = lambda what: "",
        handicap: Callable[[C], float] = lambda what: 0.0,
    ) -> None:
        self._predict, self._obstacle, self._handicap = predict, obstacle, handicap
        self.known: dict[C, Weighed[C]] = {}

    def __call__(self, what: C, limit_us: float = inf) -> Weighed[C]:
        if what not in self.known:
            self.known[what] = self._weighed(what, limit_us)
        return self.known[what]

    def unasked(self, what: C) -> Weighed[C]:
        """What can be said without a prediction."""
        return self.known.get(what) or Weighed(what, None, self._obstacle(what))

    def predict_anew(self, some: Iterable[C], predict: Callable[[C, float], float | None]) -> None:
        """Asks a better model for candidates that can be."""
        closer = Model(predict, self._obstacle)
        self.known.update({what: closer(what) for what in some})

    def explore(self, families: Iterable[CandidateFamily[C]]) -> None:
        """Asks for the first of each family that can be, and goes through those that are not far behind the best."""
        heads: list[tuple[CandidateFamily[C], dict[str, Any], float]] = []
        least_us = inf
        for family, options in map(self._head, families):
            us = self._judged_us(family.member(options), REACH * least_us)
            least_us = min(least_us, us)
            heads.append((family, options, us))
        near = [head for head in heads if head[2] < inf and head[2] <= REACH * least_us]
        for family, options, _ in sorted(near, key=lambda head: head[2])[:MOST_DESCENTS]:
            self._descend(family, options)

    def _head(self, family: CandidateFamily[C]) -> tuple[CandidateFamily[C], dict[str, Any]]:
        """The first member without an obstacle, by its options; the very first where all have one."""
        every = (dict(zip(family.grid, values, strict=True)) for values in product(*family.grid.values()))
        able = (options for options in every if not self._obstacle(family.member(options)))
        return family, next(able, {name: values[0] for name, values in family.grid.items()})

    def _descend(self, family: CandidateFamily[C], options: Mapping[str, Any]) -> None:
        """From a member, one option after the other, to the value that is best with the others as they are."""
        chosen = dict(options)
        for name, values in family.grid.items():
            best, least_us = chosen[name], inf
            for value in dict.fromkeys((best, *values)):
                us = self._judged_us(family.member({**chosen, name: value}))
                if inf > us > WORSE * least_us and isinstance(value, int):
                    break  # numbers stand in order: more of the same is worse still
                if us < least_us:
                    best, least_us = value, us
            chosen[name] = best

    def _judged_us(self, what: C, limit_us: float = inf) -> float:
        """As a choice judges it."""
        return self(what, limit_us).us + self._handicap(what)

    def _weighed(self, what: C, limit_us: float) -> Weighed[C]:
        if why := self._obstacle(what):
            return Weighed(what, None, why)
        try:
            with without_collection():  # tables have some hundred thousand rows, through which it would look in vain
                return Weighed(what, self._predict(what, limit_us))
        except OverweaveError as error:
            return Weighed(what, None, f"{error.asked}: {error.found}")
