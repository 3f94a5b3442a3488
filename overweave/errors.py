"""Every exception overweave raises: what was asked, what was found, what to do.

A caller's mistake is an `InputError`; a schedule or file that cannot be trusted is a `ScheduleError`; a peer that
died, stalled or disagreed is a `PeerError`; something the machine cannot do is a `MachineError`. All derive from
`OverweaveError`, so one `except` catches the library and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MOST_NAMED = 3
NEAR = 0.5  # share of equal letters from which on a name is offered


class OverweaveError(Exception):
    """Base of all errors. asked: what was attempted. found: what is wrong. cure: what to do."""

    def __init__(self, asked: str, found: str, cure: str) -> None:
        self.asked = asked
        self.found = found
        self.cure = cure
        super().__init__(f"{asked}: {found}. {cure}." if cure else f"{asked}: {found}.")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the attributes, not constructor arguments: a worker process sends its errors to its parent."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[OverweaveError], words: tuple[str, ...], attributes: dict[str, object]) -> OverweaveError:
    error = kind.__new__(kind, *words)
    error.__dict__.update(attributes)
    return error


class InputError(OverweaveError, ValueError):
    """An argument cannot be used: wrong shape, dtype, device, stride, option or name."""


class DirectiveError(InputError):
    """A directive in an author's kernel, or the code that it annotates, cannot be used. Names file, line and text."""

    def __init__(self, place: tuple[str, int, str], found: str, cure: str) -> None:
        self.file, self.line, self.text = place
        super().__init__(f"{self.file}:{self.line}: {self.text}", found, cure)


class MachineFileError(InputError):
    """A machine file has an invalid number, curve or link."""


class GroupError(InputError):
    """This process cannot compute in the group."""


class RankMismatch(InputError):
    """Ranks made different calls; raised on every rank before anything is launched."""


class ScheduleError(OverweaveError, ValueError):
    """A schedule or a plan cannot be used."""


class ScheduleFileError(ScheduleError):
    """A file does not hold a schedule: corrupt, hostile, too large, too deep or of an unknown form."""


class ScheduleRefused(ScheduleError):
    """`verify` found a deadlock, a race, a gap or a limit that is exceeded. `refusals` lists every reason."""

    how = "Mend the schedule; `overweave verify FILE` lists all reasons"

    def __init__(self, name: str, refusals: tuple[object, ...]) -> None:
        self.name = name
        self.refusals = refusals
        shown = "; ".join(str(refusal) for refusal in refusals[:5])
        more = f" (and {len(refusals) - 5} more)" if len(refusals) > 5 else ""
        super().__init__(f"verify {name}", f"{shown}{more}", self.how)


class ScheduleUndecided(ScheduleRefused):
    """`verify` gave up before it could tell: the schedule is too large. It does not run either."""

    how = "Make it smaller"


class MachineError(OverweaveError, RuntimeError):
    """This machine, or its software, cannot do what was asked."""


class KernelUnavailable(MachineError):
    """Triton or the GPU cannot compile a kernel. A call that did not name its plan runs cuBLAS and NCCL."""


def nearest(kind: str, asked: object, known: Iterable[str], listed_by: str) -> str:
    """Return the cure for an unknown name: all known names, or the nearest ones and the command that lists all.

    kind: of the names, such as `Schedules`. known: names, or `name=what it takes`.
    """
    names = {entry.partition("=")[0]: entry for entry in known}
    if len(names) <= MOST_NAMED:
        return f"{kind}: {', '.join(names.values()) or 'none'}"
    text = str(asked)[:80]
    substrings = [name for name in names if text and (text in name or name in text)]
    candidates = [
        *substrings,
        *(name for name in get_close_matches(text, names, MOST_NAMED, NEAR) if name not in substrings),
    ]
    if not candidates:
        return f"{kind}: `{listed_by}` lists all, and none of them is near"
    return (
        f"{kind}, nearest first: {', '.join(names[name] for name in candidates[:MOST_NAMED])}; `{listed_by}` lists all"
    )


# Optional package -> how to install it.
PACKAGES = {
    "bokeh": "pip install 'bokeh>=3.6'",
    "cuda": "pip install 'cuda-bindings>=12.9', of the CUDA that your torch was built for",
    "libcst": "pip install 'libcst>=1.8'",
    "matplotlib": "pip install 'matplotlib>=3.9'",
    "triton": "Install the triton that your torch names; for its CPU build, pip install triton==3.6.0 'numpy<2.4'",
    "torch": "pip install 'torch>=2.10'",
}


def package_error(asked: str, error: ModuleNotFoundError) -> Exception:
    """Return the error to raise if loading `asked` failed: a MachineError with a cure for a package of PACKAGES."""
    package = (error.name or "").partition(".")[0]
    if package not in PACKAGES:
        return error
    return MachineError(asked, f"{package} is not installed", PACKAGES[package])


class PeerError(OverweaveError, RuntimeError):
    """A peer failed. Results of the call are invalid, and its workspace refuses calls until it is reset."""


class PeerDied(PeerError):
    """A peer's process ended during a call."""


class PeerTimeout(PeerError):
    """A wait exceeded its deadline: a peer is absent, stuck or far behind."""


class WorkspaceBroken(PeerError):
    """An earlier call on this group failed; the workspace must be reset on every rank first."""
