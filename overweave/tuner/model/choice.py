"""The tuner's answer: the chosen plan, the source of the answer, and what was rejected and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from overweave.ir.dtype import ITEMSIZE_BYTES
from overweave.ir.problem import Problem
from overweave.tuner.model.candidate_model import State, Weighed
from overweave.tuner.space.space import Candidate, candidate, full_options, library_path, reason_unsupported
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


# The library path is a candidate here too: it is taken where overlap loses, or a kernel cannot address the operands.

# The least time of the plain calls at which overlap pays, and the rates of cuBLAS and NCCL for that estimate.
# MEASURED: eager calls of 256 to 8,192 rows of Llama-3 and mlp layers, W=4 (4 x H200, 2026-11-20): below about 115 us
# the overlapped plan's launches and flags cost more than the overlap gains.
PAYS_FROM_US, TFLOPS, WIRE_GB_PER_S = 115.0, 650.0, 250.0


def default_plan(problem: Problem, target: Target) -> Choice:
    """Return the plan for a problem on a target, with reasons."""
    rule = problem.record.size_rule
    sequential, overlapped = library_path(problem.operator), f"{problem.operator}.{rule.overlapped}"
    too_small = _too_small(problem) if target.kind != "cpu" else ""
    if too_small:
        why = "the plain library calls win at this size"
        return make_choice(problem, target, sequential, ("rule", why), ((overlapped, too_small),))
    if why_not := reason_unsupported(problem, target, candidate(rule.overlapped, {})):
        taken, why = candidate(rule.without_kernel, {}), "library matmuls take any layout"
        return make_choice(problem, target, taken, ("rule", why), ((overlapped, why_not),))
    if target.kind == "cpu":
        why = "on the CPU the overlapped schedule is emulated, whatever the size"
        return make_choice(problem, target, candidate(rule.overlapped, {}), ("rule", why))
    why = "copies hide behind the tiles of one kernel"
    return make_choice(problem, target, candidate(rule.overlapped, rule.options), ("rule", why))


def wire_bytes(problem: Problem) -> int:
    """Return the bytes that one rank receives: all moved rows but its own; of an all-reduce twice, as parts and as
    sums."""
    rows = problem.m * (2 if problem.record.shares_sums else 1)
    moved = rows * problem.moved_columns * ITEMSIZE_BYTES[problem.moved_dtype]
    return moved * (problem.world_size - 1) // problem.world_size


def predicted_us(problem: Problem) -> float:
    """Return the time of one cuBLAS matmul and one NCCL collective in sequence."""
    work = 2.0 * problem.m * problem.multiplied_columns * problem.k
    return work / TFLOPS / 1e6 + wire_bytes(problem) / WIRE_GB_PER_S / 1e3


def _too_small(problem: Problem) -> str:
    """Return why overlap does not pay; "" if it does."""
    plain_us = predicted_us(problem)
    if plain_us >= PAYS_FROM_US:
        return ""
    return f"the plain calls take about {plain_us:.0f} us, and overlap pays from {PAYS_FROM_US:.0f} us on"
