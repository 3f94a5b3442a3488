"""Predictions for any kind of candidates: each is predicted at most once, family by family, option by option."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from math import inf
from typing import Any, Generic, Literal, Protocol, TypeVar

from msgspec import Struct

from overweave.errors import OverweaveError
from overweave.ir.pause_gc import without_collection

MOST_DESCENTS = 6  # families whose further members are predicted, the fastest first
WORSE = 1.01  # a value of an option this factor slower than the best one ends the search along the option
REACH = 1.2  # families whose first member is at most this factor slower than the fastest are searched
State = Literal["measured", "simulated", "impossible", "unknown"]
C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)


class Weighed(Struct, Generic[C], frozen=True):
    """A candidate with its predicted and measured time, or why it is impossible; without either if it was not
    measured."""

    candidate: C
    predicted_us: float | None = None
    obstacle: str = ""
    measured_us: float | None = None

    @property
    def way(self) -> C:
        """Return the candidate, by its name in the results of `compile_auto`."""
        return self.candidate

    @property
    def us(self) -> float:
        """Return the predicted time; infinite if there is none."""
        return inf if self.predicted_us is None else self.predicted_us

    @property
    def state(self) -> State:
        """Return what is known of it."""
        if self.obstacle:
            return "impossible"
        if self.measured_us is not None:
            return "measured"
        return "unknown" if self.predicted_us is None else "simulated"

    def line(self, width: int) -> str:
        """Return the candidate, padded to a width, and its times."""
        times = (("predicted", self.predicted_us), ("measured", self.measured_us))
        known = ", ".join(f"{word} {us:.1f} us" for word, us in times if us is not None) or "nothing known"
        return f"{self.candidate!s:{width}s}  {f'not: {self.obstacle}' if self.obstacle else known}"


class Family(Protocol[C_co]):
    """Candidates that differ in the values of options."""

    @property
    def grid(self) -> Mapping[str, tuple[Any, ...]]: ...

    def member(self, options: Mapping[str, Any]) -> C_co: ...


class Model(Generic[C]):
    """Predicts every candidate at most once. results: candidate -> its prediction, in order.

    predict: microseconds; None if unknown, or if more than the limit; raises OverweaveError for an impossible
    candidate. obstacle: why a candidate is impossible, or "". handicap: microseconds added to a candidate's time in
    comparisons. shortfall: by how many microseconds a candidate with such a time misses what it must gain to be taken.
    """

    def __init__(
        self,
        predict: Callable[[C, float], float | None],
        obstacle: Callable[[C], str] = lambda candidate: "",
        handicap: Callable[[C], float] = lambda candidate: 0.0,
        shortfall: Callable[[C, float], float] = lambda candidate, us: 0.0,
    ) -> None:
        self._predict, self._obstacle, self._handicap, self._shortfall = predict, obstacle, handicap, shortfall
        self.results: dict[C, Weighed[C]] = {}

    def __call__(self, candidate: C, limit_us: float = inf) -> Weighed[C]:
        if candidate not in self.results:
            self.results[candidate] = self._weigh(candidate, limit_us)
        return self.results[candidate]

    def without_prediction(self, candidate: C) -> Weighed[C]:
        """Return what is known of a candidate without predicting it."""
        return self.results.get(candidate) or Weighed(candidate, None, self._obstacle(candidate))

    def predict_again(self, candidates: Iterable[C], predict: Callable[[C, float], float | None]) -> None:
        """Replace the predictions of possible candidates by those of a better model."""
        closer = Model(predict, self._obstacle)
        self.results.update({candidate: closer(candidate) for candidate in candidates})

    def explore(self, families: Iterable[Family[C]]) -> None:
        """Predict the first possible member of each family, and descend in those that are not far behind the best.

        The best is one that may be taken: a quicker one that may not must hide none that may.
        """
        heads: list[tuple[float, float, Family[C], dict[str, Any]]] = []
        least_us = inf
        for family, options in map(self._first_able, families):
            candidate = family.member(options)
            us = self._handicapped_us(candidate, REACH * least_us)
            shortfall_us = self._shortfall(candidate, self(candidate).us)
            least_us = least_us if shortfall_us else min(least_us, us)
            heads.append((shortfall_us, us, family, options))
        near = [head for head in heads if head[1] < inf and head[1] <= REACH * least_us]
        for *_, family, options in sorted(near, key=lambda head: head[:2])[:MOST_DESCENTS]:
            self._descend(family, options)

    def _first_able(self, family: Family[C]) -> tuple[Family[C], dict[str, Any]]:
        """Return the first member without an obstacle, by its options; the very first if all have one."""
        every = (dict(zip(family.grid, values, strict=True)) for values in product(*family.grid.values()))
        able = (options for options in every if not self._obstacle(family.member(options)))
        return family, next(able, {name: values[0] for name, values in family.grid.items()})

    def _descend(self, family: Family[C], options: Mapping[str, Any]) -> None:
        """Go from a member, one option after the other, to the value that is best with the others fixed."""
        best_options = dict(options)
        for name, values in family.grid.items():
            best, least_us = best_options[name], inf
            for value in dict.fromkeys((best, *values)):
                us = self._handicapped_us(family.member({**best_options, name: value}))
                if inf > us > WORSE * least_us and isinstance(value, int):
                    break  # values are sorted: the next ones are worse still
                if us < least_us:
                    best, least_us = value, us
            best_options[name] = best

    def _handicapped_us(self, candidate: C, limit_us: float = inf) -> float:
        """Return the time that comparisons use."""
        return self(candidate, limit_us).us + self._handicap(candidate)

    def _weigh(self, candidate: C, limit_us: float) -> Weighed[C]:
        if why := self._obstacle(candidate):
            return Weighed(candidate, None, why)
        try:
            with without_collection():  # a collection would scan hundreds of thousands of table rows for nothing
                return Weighed(candidate, self._predict(candidate, limit_us))
        except OverweaveError as error:
            return Weighed(candidate, None, f"{error.asked}: {error.found}")
