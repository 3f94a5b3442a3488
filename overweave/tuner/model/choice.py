"""The tuner's answer: the chosen plan, the source of the answer, and what was rejected and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from overweave.ir.problem import Problem
from overweave.tuner.model.candidate_model import State, Weighed
from overweave.tuner.space.space import Candidate, full_options
from overweave.tuner.space.target import Target
from overweave.tuner.store.table import ChoiceSource


class Choice(Struct, frozen=True):
    """A schedule of the catalog with its options, or one of torch's operators; why it was chosen, and what was
    rejected.

    source: where the answer comes from. text: the choice as the operators' `plan=` takes it. weights: all candidates,
    if `explain` has ranked them. library: the library path among them, by its text. tiles: the occupancy of its
    matmul's tiles. machine: the described machine that predictions were made on.
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
        """Return what runs and why, the source of its time, its gain, and counts of the candidates."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        runs = f"{self.plan} runs{f' with {options}' if options else ''}, because {self.reason}."
        rest = [*filter(None, [self.tiles]), SOURCES[self.source], *self._gain(), *candidate_counts(self.weights)]
        return [runs, *rest, *([f"Machine: {self.machine}."] if self.machine else [])]

    def rows(self) -> list[tuple[State, str]]:
        """Return one line for each candidate, with its times; the one that runs has an arrow."""
        width = max((len(weight.candidate) for weight in self.weights), default=0)
        lines = [
            (each.state, f"  {'->' if self._is_taken(each) else '  '} {each.line(width)}") for each in self.weights
        ]
        listed = {weight.candidate for weight in self.weights}
        rejected: list[tuple[State, str]] = [
            ("impossible", f"  not {name}: {why}") for name, why in self.rejected if name not in listed
        ]
        return lines + rejected

    def _gain(self) -> Iterator[str]:
        """Yield a sentence that compares the choice with the library path, by times of one kind."""
        choice = next((each for each in self.weights if self._is_taken(each)), None)
        library = next((each for each in self.weights if each.candidate == self.library and not each.obstacle), None)
        if choice is None or library is None or choice is library:
            return
        for word, ours_us, theirs_us in (
            ("Measured", choice.measured_us, library.measured_us),
            ("Simulated", choice.predicted_us, library.predicted_us),
        ):
            if ours_us and theirs_us:
                ratio = f"{theirs_us / ours_us:.2f} times as fast"
                yield f"{word}, it takes {ours_us:.1f} us and the library path {theirs_us:.1f} us: {ratio}."
                return

    def _is_taken(self, weight: Weighed[str]) -> bool:
        """Whether it is the chosen candidate, and not an impossible one of the same text."""
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


def candidate_counts(weights: Sequence[Weighed[Any]]) -> list[str]:
    """Return a sentence with the numbers of candidates that are measured, simulated, impossible; [] without any."""
    if not weights:
        return []
    counts = Counter(weight.state for weight in weights)
    parts = [words.format(counts[state]) for state, words in _COUNTS.items() if counts[state]]
    return [f"Candidates: {', '.join(parts)}."]


def make_choice(
    problem: Problem,
    target: Target,
    candidate: Candidate,
    because: tuple[ChoiceSource, str],
    rejected: tuple[tuple[str, str], ...] = (),
) -> Choice:
    """Return a candidate as the answer. because: its source and reason."""
    source, reason = because
    options = full_options(problem, target, candidate)
    return Choice(candidate.schedule(problem.operator), options, reason, rejected, source, str(candidate))
