"""What the tuner answers: the plan that is taken, where the answer comes from, and what was not taken and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from overweave.ir.problem import Problem
from overweave.tuner.model.weigh import State, Weighed
from overweave.tuner.space.space import Candidate, full_options
from overweave.tuner.space.target import Target
from overweave.tuner.store.table import ChoiceSource


class Choice(Struct, frozen=True):
    """A schedule of the catalog with its options, or one of torch's; why it was taken, and what was not taken and why.

    source: where the answer comes from. text: the choice as the operators' `plan=` takes it. weights: all candidates,
    where `explain` has weighed them. library: the library path among them, by its text. tiles: how those of its matmul
    fill the GPU. machine: the described machine that predictions were made on.
    """

    plan: str
    options: dict[str, str | int]
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    source: ChoiceSource = "rule"
    text: str = ""
    weights: tuple[Weighed[str], ...] = ()
    library: str = ""
    tiles: str = ""
    machine: str = ""

    def __str__(self) -> str:
        return "\n".join([*self.sentences(), *(line for _, line in self.rows())])

    def sentences(self) -> list[str]:
        """What runs and why, how that is known, what it gains, and of how many candidates what is known."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        runs = f"{self.plan} runs{f' with {options}' if options else ''}, because {self.reason}."
        told = [*filter(None, [self.tiles]), SOURCES[self.source], *self._gain(), *counted(self.weights)]
        return [runs, *told, *([f"Machine: {self.machine}."] if self.machine else [])]

    def rows(self) -> list[tuple[State, str]]:
        """One line for each candidate, with what is known of it; the one that runs has an arrow."""
        width = max((len(weight.candidate) for weight in self.weights), default=0)
        lines = [(each.state, f"  {'->' if self._is(each) else '  '} {each.line(width)}") for each in self.weights]
        told = {weight.candidate for weight in self.weights}
        rejected: list[tuple[State, str]] = [
            ("impossible", f"  not {name}: {why}") for name, why in self.rejected if name not in told
        ]
        return lines + rejected

    def _gain(self) -> Iterator[str]:
        """A sentence that sets what runs beside the library path, by times of one kind."""
        taken = next((each for each in self.weights if self._is(each)), None)
        library = next((each for each in self.weights if each.candidate == self.library and not each.obstacle), None)
        if taken is None or library is None or taken is library:
            return
        for word, ours_us, theirs_us in (
            ("Measured", taken.measured_us, library.measured_us),
            ("Simulated", taken.predicted_us, library.predicted_us),
        ):
            if ours_us and theirs_us:
                ratio = f"{theirs_us / ours_us:.2f} times as fast"
                yield f"{word}, it takes {ours_us:.1f} us and the library path {theirs_us:.1f} us: {ratio}."
                return

    def _is(self, weight: Weighed[str]) -> bool:
        """Whether it is what was taken, and not what cannot be of the same text."""
        return weight.candidate == self.text and not weight.obstacle


SOURCES: dict[ChoiceSource, str] = {
    "cache": "Its time was measured on this machine.",
    "table": "Its time was measured for the package on such a machine.",
    "nearest": "Its time was measured on the nearest known problem, not on this one.",
    "model": "Its time was simulated: nothing was measured.",
    "rule": "A rule decided: nothing was measured or simulated.",
    "asked": "The caller named it.",
}
_COUNTS: dict[State, str] = {
    "measured": "{} measured",
    "simulated": "{} simulated only",
    "impossible": "{} cannot run here",
    "unknown": "of {} nothing is known",
}


def counted(weights: Sequence[Weighed[Any]]) -> list[str]:
    """A sentence that says of how many candidates what is known; none where nobody weighed them."""
    if not weights:
        return []
    counts = Counter(weight.state for weight in weights)
    parts = [words.format(counts[state]) for state, words in _COUNTS.items() if counts[state]]
    return [f"Candidates: {', '.join(parts)}."]


def chosen(
    problem: Problem,
    target: Target,
    what: Candidate,
    because: tuple[ChoiceSource, str],
    rejected: tuple[tuple[str, str], ...] = (),
) -> Choice:
    """A candidate as the answer, for a source and a reason."""
    source, reason = because
    options = full_options(problem, target, what)
    return Choice(what.schedule(problem.operator), options, reason, rejected, source, str(what))
