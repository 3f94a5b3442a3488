"""Which way a compiled kernel runs: the model ranks, a tuning measures the best few, and a file keeps what came out.

Between chunks: the schedule of each tensor, its pieces and movers. Within a chunk: the constants of the kernel's tile,
and of its launch. Both are coordinates of one space, and the search goes along one after the other.
SOURCE: AutoOverlap 5.3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError, OverweaveError
from overweave.hardware.machine import Machine
from overweave.schedules.methods.record import WITH_KERNELS
from overweave.schedules.weave.transports import Asked
from overweave.tuner.model.rank import REACH, machine_of
from overweave.tuner.space.compiled import Constants, Family, Way, families, is_member, neighbours
from overweave.tuner.space.target import Target
from overweave.tuner.store.caches import cache_folders
from overweave.tuner.store.whole_file import replace_whole

LARGEST_BYTES = 1 << 20
MOST_MEASURED, MOST_AROUND, FINALISTS = 8, 4, 4

Predict = Callable[[Way, Machine], float]  # microseconds; raises OverweaveError for a way that cannot be


class Judged(Struct, frozen=True):
    """A way with its predicted time, or why it cannot be; neither where no machine is described."""

    way: Way
    predicted_us: float | None = None
    obstacle: str = ""


class Timed(Struct, frozen=True, forbid_unknown_fields=True):
    way: Way
    us: float


class Measured(Struct, frozen=True, forbid_unknown_fields=True):
    """What a tuning found, the quickest first. key: of what was measured (`content_key`)."""

    key: str
    times: tuple[Timed, ...]


def described(target: Target, world_size: int) -> Machine | None:
    """The machine that predictions are made on: the target's, or for a CPU, where nothing is timed, a GPU's."""
    return machine_of(target if target.kind == "cuda" else Target("cuda"), world_size)


def judge(
    asked: Mapping[str, Asked], configs: tuple[Constants, ...], predict: Predict, machine: Machine | None
) -> tuple[Judged, ...]:
    """Every way that was looked at, in the order of looking; the library's with the first constants stands first.

    The first of each schedule is predicted; those not far behind the best are gone through option by option, tensor
    after tensor; then the constants, with the schedules as they are.
    """
    model = _Model(predict, machine)
    by_tensor = {tensor: families(how) for tensor, how in asked.items()}
    best = model.judged(Way(tuple((tensor, _first(known)) for tensor, known in by_tensor.items()), configs[0]))
    for tensor, known in by_tensor.items():
        heads = [model.judged(best.way.with_exchange(tensor, _first((family,)))) for family in known]
        least_us = min((each.predicted_us for each in heads if each.predicted_us is not None), default=0.0)
        for family, head in zip(known, heads, strict=True):
            if head.predicted_us is not None and head.predicted_us <= REACH * least_us:
                _descend(model, family, best.way, tensor)
        best = model.best()
    for constants in configs[1:]:
        model.judged(replace(best.way, constants=constants))
    return tuple(model.known.values())


def cold(judged: tuple[Judged, ...]) -> Way:
    """The quickest by prediction; the library's, which stands first, is given the margin that operators give it."""
    base = judged[0]
    possible = [each for each in judged if each.predicted_us is not None]
    if base.predicted_us is None or not possible:
        return next((each.way for each in judged if not each.obstacle), base.way)
    ahead_us = WITH_KERNELS.us + WITH_KERNELS.share * base.predicted_us
    library = [each for each in possible if each.way.exchanges == base.way.exchanges]
    best, best_library = min(possible, key=_us), min(library, key=_us)
    return best.way if _us(best) + ahead_us < _us(best_library) else best_library.way


def shortlist(judged: tuple[Judged, ...]) -> tuple[Way, ...]:
    """What is worth measuring first: the library's way, the best of each of the best few schedules with each back end,
    whose options the model hardly tells apart, and the best of all in all other constants."""
    possible = [each for each in judged if not each.obstacle]
    ranked = sorted(possible, key=lambda each: each.predicted_us or 0.0)
    of_base = [each.way for each in ranked if each.way.constants == judged[0].way.constants]
    of_schedules: dict[tuple[str, ...], Way] = {}
    for way in of_base:
        of_schedules.setdefault(_kind(way), way)
    best = of_base[0].exchanges if of_base else ()
    varied = [each.way for each in possible if each.way.exchanges == best]
    return tuple(
        dict.fromkeys([*(each.way for each in possible[:1]), *list(of_schedules.values())[:MOST_MEASURED], *varied])
    )


def around(base: Constants, times: tuple[Timed, ...], asked: Mapping[str, Asked]) -> tuple[Way, ...]:
    """What is worth measuring next: the best that was measured, varied along one coordinate after the other.

    times: the quickest first. The schedules that were best with the constants `base` are taken with the best few
    constants; their options are varied one by one with the best constants.
    """
    best = next((one.way for one in times if one.way.constants == base), times[0].way)
    constants = list(dict.fromkeys(one.way.constants for one in times))[:MOST_AROUND]
    ways = [replace(best, constants=each) for each in constants]
    ways += neighbours(replace(best, constants=constants[0]), asked)
    measured = {one.way for one in times}
    return tuple(way for way in dict.fromkeys(ways) if way not in measured)


def content_key(*parts: object) -> str:
    """The digest of everything that a measurement depends on, as text."""
    return blake2b("\0".join(map(str, parts)).encode(), digest_size=12).hexdigest()


def kept_path(name: str, key: str) -> Path:
    """Where the tuning of a kernel is kept: another file for any other content."""
    return cache_folders()["overweave"] / "compiled" / f"{name}.{key}.json"


def recall(name: str, key: str, asked: Mapping[str, Asked], configs: tuple[Constants, ...]) -> Measured | None:
    """What was measured of this very content. A file that holds anything else is ignored aloud."""
    path = kept_path(name, key)
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > LARGEST_BYTES:
            raise InputError("compiled kernel", "its file is too large", "")
        found = msgspec.json.decode(path.read_bytes(), type=Measured)
        strange = [each.way for each in found.times if not is_member(each.way, asked, configs)]
        if found.key != key or strange or not found.times:
            raise InputError("compiled kernel", f"it names what nobody could have measured: {strange[:1]}", "")
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, InputError) as error:
        message = f"overweave: {path} is ignored and will be written anew: {str(error)[:300]}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None
    return found


def remember(name: str, measured: Measured) -> None:
    """Writes it whole or not at all. Warns if it cannot be written."""
    path = kept_path(name, measured.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")
    except OSError as error:
        warnings.warn(f"overweave: {path} is not written: {error}", RuntimeWarning, stacklevel=2)


class _Model:
    """Asks for every way at most once."""

    def __init__(self, predict: Predict, machine: Machine | None) -> None:
        self._predict, self._machine = predict, machine
        self.known: dict[Way, Judged] = {}

    def judged(self, way: Way) -> Judged:
        if way not in self.known:
            self.known[way] = self._judged(way)
        return self.known[way]

    def best(self) -> Judged:
        """Of all that can be; the first one where nothing is predicted."""
        predicted = [each for each in self.known.values() if each.predicted_us is not None]
        return min(predicted, key=_us, default=next(iter(self.known.values())))

    def _judged(self, way: Way) -> Judged:
        if self._machine is None:
            return Judged(way)
        try:
            return Judged(way, self._predict(way, self._machine))
        except OverweaveError as error:
            return Judged(way, None, f"{error.asked}: {error.found}")


def _descend(model: _Model, family: Family, way: Way, tensor: str) -> None:
    """From a schedule's first options, one after the other, to the values that are best with the others as they are."""
    values = family.values()
    chosen = {name: tried[0] for name, tried in values.items()}
    for name, tried in values.items():
        known = [model.judged(way.with_exchange(tensor, family.member({**chosen, name: value}))) for value in tried]
        chosen[name] = min(zip(known, tried, strict=True), key=lambda one: _us(one[0]))[1]


def _kind(way: Way) -> tuple[str, ...]:
    """The schedule of each tensor, and who carries it."""
    parts = ((word for word in how.split()[1:] if word.startswith("mover=")) for _, how in way.exchanges)
    names = (how.split()[0] for _, how in way.exchanges)
    return tuple(" ".join((name, *movers)) for name, movers in zip(names, parts, strict=True))


def _first(known: Iterable[Family]) -> str:
    return next(member for family in known for member in family.members())


def _us(each: Judged) -> float:
    return float("inf") if each.predicted_us is None else each.predicted_us
