"""What a command may take to read and prove what nobody vouches for, and how it says that this was not enough.

The passes of verify count their work, and give up on their own. This is the fence behind them: whatever a file makes of
the rest, the processor's time and the memory that it costs are bounded.
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

SECONDS, SECONDS_PER_MIB = 1.5, 1.75  # of the processor, beside what a command takes to start and to print
BYTES, LEAST_BYTES = 2**30, 2**28  # of memory, with what a command takes to start; beside that at least
_SLACK_BYTES = 2**26  # to end with words
PROVEN, REFUTED, UNUSABLE, NOT_DECIDED = "proven", "refuted", "unusable", "not decided"
EXIT_CODES = {PROVEN: 0, REFUTED: 1, UNUSABLE: 2, NOT_DECIDED: 3}


_TOLD = OverweaveError, typer.Exit, typer.Abort


class _Clock:
    """Rings when the processor's time is spent."""

    def __init__(self) -> None:
        self.has_rung = False

    def ring(self, number: int, frame: FrameType | None) -> None:
        self.has_rung = True
        raise TimeoutError


@contextmanager
def limited(*paths: Path, seconds: float | None = None) -> Iterator[None]:
    """Raises ScheduleUndecided where what is made of files takes more than their sizes explain, or ends in a fault.

    seconds: of the processor, in place of what the sizes allow. Without a file nothing is limited: it is the caller's
    own time.
    """
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
        resource.setrlimit(resource.RLIMIT_AS, (_least(mapped + room, soft, hard), hard))
        signal.setitimer(signal.ITIMER_PROF, seconds)
        yield
    except Exception as error:  # what is raised within a library may come out as another
        name = printable(" and ".join(map(str, paths)))
        if clock.has_rung or isinstance(error, MemoryError):
            spent = f"{seconds:.1f} s" if clock.has_rung else f"{room >> 20} MiB of memory"
            found = f"it takes more than {spent} for {mib:.1f} MiB"
            raise ScheduleUndecided(name, (Refusal(TOO_LARGE, None, None, None, found),)) from None
        if isinstance(error, (*_TOLD, OSError)):
            raise
        raise ScheduleUndecided(name, (Refusal(FAULT, None, None, None, _fault(error)),)) from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def allowed_s(*paths: Path) -> float:
    """Seconds of the processor that the sizes of files explain."""
    return SECONDS + SECONDS_PER_MIB * sum(map(_size_bytes, paths)) / 2**20


def files_of(*names: str | None) -> tuple[Path, ...]:
    """Of names that users give, those of files that are there."""
    return tuple(path for path in map(Path, filter(None, names)) if _size_bytes(path))


def _fault(error: Exception) -> str:
    """Where a fault of ours lies. No file may cause one, so that whoever meets it should be able to say where."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}, line {frame.lineno}"
    return f"a fault of overweave's, which proves nothing: {type(error).__name__} in {place}. Please report it"


@contextmanager
def told_as_json(name: object, is_asked: bool) -> Iterator[None]:
    """Errors also as the JSON object that was asked for in place of words."""
    try:
        yield
    except OverweaveError as error:
        if is_asked:
            typer.echo(as_object(printable(name), *outcome_of(error)))
        raise


def outcome_of(error: OverweaveError) -> tuple[str, tuple[object, ...]]:
    """What an error says of the file that it is about, and every reason."""
    if isinstance(error, ScheduleRefused):
        return NOT_DECIDED if isinstance(error, ScheduleUndecided) else REFUTED, error.refusals
    return UNUSABLE, ({"message": str(error)},)


def as_object(name: str, verdict: str, refusals: object, notes: tuple[str, ...] = ()) -> str:
    """The one JSON object of a verdict."""
    found = {"name": name, "verdict": verdict, "refusals": refusals, "notes": notes}
    return msgspec.json.encode(found).decode()


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


def _mapped_and_resident_bytes() -> tuple[int, int]:
    mapped, resident, *_ = Path("/proc/self/statm").read_text().split()
    return int(mapped) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _least(*limits: int) -> int:
    return min(limit for limit in limits if limit != resource.RLIM_INFINITY)
