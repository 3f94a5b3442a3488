"""Limits of processor time and memory for commands that read untrusted files, and the verdict if they are exceeded.

The passes of verify count their work, and give up by themselves. These limits bound all other work on a file.
"""

from __future__ import annotations

import resource
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import typer

from overweave.errors import OverweaveError, ScheduleRefused, ScheduleUndecided
from overweave.ir.text.files import printable
from overweave.ir.verify.rules.verdict import FAULT, TOO_LARGE, Refusal

SECONDS, SECONDS_PER_MIB = 1.5, 1.75  # of processor time, without start and output
BYTES, LEAST_BYTES = 2**30, 2**28  # of memory: the limit with the start of the command, the least without it
_SLACK_BYTES = 2**26  # memory left for the error's message
PROVEN, REFUTED, UNUSABLE, NOT_DECIDED = "proven", "refuted", "unusable", "not decided"
EXIT_CODES = {PROVEN: 0, REFUTED: 1, UNUSABLE: 2, NOT_DECIDED: 3}


_EXPECTED_ERRORS = OverweaveError, typer.Exit, typer.Abort


class _Clock:
    """The handler of the timer's signal; has_rung: whether the processor time is spent."""

    def __init__(self) -> None:
        self.has_rung = False

    def ring(self, number: int, frame: FrameType | None) -> None:
        self.has_rung = True
        raise TimeoutError


@contextmanager
def limited(*paths: Path, seconds: float | None = None) -> Iterator[None]:
    """Raise ScheduleUndecided if the block takes more time or memory than the files' sizes allow, or fails by a bug of
    ours. seconds: of processor time, in place of what the sizes allow. Without a file nothing is limited."""
    if not paths:
        yield
        return
    mib = sum(map(_size_bytes, paths)) / 2**20
    seconds = allowed_s(*paths) if seconds is None else seconds
    mapped, resident = _mapped_and_resident_bytes()
    room = max(BYTES - _SLACK_BYTES - resident, LEAST_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    clock = _Clock()
    before = signal.signal(signal.SIGPROF, clock.ring)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_smallest_limit(mapped + room, soft, hard), hard))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        yield
    except Exception as error:  # a library may have replaced the TimeoutError by another error
        name = printable(" and ".join(map(str, paths)))
        if clock.has_rung or isinstance(error, MemoryError):
            budget = f"{seconds:.1f} s" if clock.has_rung else f"{room >> 20} MiB of memory"
            reason = f"it takes more than {budget} for {mib:.1f} MiB"
            raise ScheduleUndecided(name, (Refusal(TOO_LARGE, None, None, None, reason),)) from None
        if isinstance(error, (*_EXPECTED_ERRORS, OSError)):
            raise
        raise ScheduleUndecided(name, (Refusal(FAULT, None, None, None, _fault(error)),)) from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def allowed_s(*paths: Path) -> float:
    """Return the seconds of processor time for files of these sizes."""
    return SECONDS + SECONDS_PER_MIB * sum(map(_size_bytes, paths)) / 2**20


def existing_files(*names: str | None) -> tuple[Path, ...]:
    """Return those of the user's names that are files."""
    return tuple(path for path in map(Path, filter(None, names)) if _size_bytes(path))


def _fault(error: Exception) -> str:
    """Return a message with the place of a bug of ours. No file may cause one, so users should report it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}, line {frame.lineno}"
    return f"a fault of overweave's, which proves nothing: {type(error).__name__} in {place}. Please report it"


@contextmanager
def errors_as_json(name: object, is_asked: bool) -> Iterator[None]:
    """Print errors as a JSON object, too, if JSON output was asked for."""
    try:
        yield
    except OverweaveError as error:
        if is_asked:
            typer.echo(verdict_json(printable(name), *outcome_of(error)))
        raise


def outcome_of(error: OverweaveError) -> tuple[str, tuple[object, ...]]:
    """Return the verdict that an error means for its file, and every reason."""
    if isinstance(error, ScheduleRefused):
        return NOT_DECIDED if isinstance(error, ScheduleUndecided) else REFUTED, error.refusals
    return UNUSABLE, ({"message": str(error)},)


def verdict_json(name: str, verdict: str, refusals: object, notes: tuple[str, ...] = ()) -> str:
    """Return the JSON object of a verdict."""
    verdict_fields = {"name": name, "verdict": verdict, "refusals": refusals, "notes": notes}
    return msgspec.json.encode(verdict_fields).decode()


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


def _mapped_and_resident_bytes() -> tuple[int, int]:
    mapped, resident, *_ = Path("/proc/self/statm").read_text().split()
    return int(mapped) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _smallest_limit(*limits: int) -> int:
    return min(limit for limit in limits if limit != resource.RLIM_INFINITY)
