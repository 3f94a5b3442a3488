"""What the tuner answers: the plan that is taken, where the answer comes from, and what was not taken and why."""

from __future__ import annotations

from msgspec import Struct

from overweave.ir.problem import Problem
from overweave.tuner.space.space import Candidate, full_options
from overweave.tuner.space.target import Target
from overweave.tuner.store.table import Source


class Weight(Struct, frozen=True):
    """What is known of one candidate: its time by the model, its time as measured, or why it cannot be."""

    candidate: str
    predicted_us: float | None = None
    measured_us: float | None = None
    obstacle: str = ""

    def is_open(self, text: str) -> bool:
        """Whether it is the candidate of this text, and not one of its name that cannot be."""
        return self.candidate == text and not self.obstacle

    def line(self, width: int) -> str:
        """The candidate, padded to a width, and what is known."""
        times = (("predicted", self.predicted_us), ("measured", self.measured_us))
        told = ", ".join(f"{word} {us:.1f} us" for word, us in times if us is not None)
        return f"{self.candidate:{width}s}  {f'not: {self.obstacle}' if self.obstacle else told or 'nothing known'}"


class Choice(Struct, frozen=True):
    """A schedule of the catalog with its options, or one of torch's; why it was taken, and what was not taken and why.

    source: where the answer comes from. text: the choice as the operators' `plan=` takes it. weights: all candidates,
    where `explain` has weighed them.
    """

    plan: str
    options: dict[str, str | int]
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    source: Source = "rule"
    text: str = ""
    weights: tuple[Weight, ...] = ()

    def __str__(self) -> str:
        options = " ".join(f"-o {name}={value}" for name, value in self.options.items())
        lines = [f"{self.plan} {options}".rstrip(), f"  because {self.reason}", f"  source: {SOURCES[self.source]}"]
        if self.weights:
            width = max(len(weight.candidate) for weight in self.weights)
            marks = ["->" if weight.is_open(self.text) else "  " for weight in self.weights]
            lines += [f"  {mark} {weight.line(width)}" for mark, weight in zip(marks, self.weights, strict=True)]
        told = {weight.candidate for weight in self.weights}
        return "\n".join([*lines, *(f"  not {name}: {why}" for name, why in self.rejected if name not in told)])


SOURCES: dict[Source, str] = {
    "cache": "measured on this machine",
    "table": "measured for the package on such a machine",
    "nearest": "measured on the nearest known problem",
    "model": "simulated, nothing was measured",
    "rule": "a rule, nothing was measured or simulated",
    "asked": "the caller",
}


def chosen(
    problem: Problem,
    target: Target,
    what: Candidate,
    because: tuple[Source, str],
    rejected: tuple[tuple[str, str], ...] = (),
) -> Choice:
    """A candidate as the answer, for a source and a reason."""
    source, reason = because
    options = full_options(problem, target, what)
    return Choice(what.schedule(problem.operator), options, reason, rejected, source, str(what))
