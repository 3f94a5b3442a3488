"""A calibrated file of this machine comes first, where it is one, and where all ranks have it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from overweave.hardware.cards import Gpu, find, machine_for
from overweave.tuner.calibrate.machine_file import machine_file
from overweave.tuner.space import target
from overweave.tuner.space.target import agreed_machine, calibrated_path, machine_of, save_calibrated
from tests.tuner.calibrate.test_machine_file import FOUND, LIKE, SOURCE

GPU = Gpu("NVIDIA H200", (9, 0), FOUND.sms, 139.8, "nvswitch")
FILE = machine_file("mine", FOUND, LIKE, SOURCE)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path))


def test_a_calibrated_file_comes_first_and_predictions_use_it():
    assert machine_of(GPU) == find(GPU)
    save_calibrated(GPU, FILE)
    found = machine_of(GPU)
    assert found.basis == "calibrated"
    assert machine_for(found, 4).latency.call.us == 4.5
    save_calibrated(GPU, FILE.replace(b"4.5", b"9.5"))
    assert machine_for(machine_of(GPU), 4).latency.call.us == 9.5


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", FILE.replace(b'"sms": 114', b'"sms": 132'), b"\xff" * 64])
def test_what_is_no_file_of_this_machine_is_ignored_aloud(data: bytes):
    calibrated_path(GPU).parent.mkdir(parents=True)
    calibrated_path(GPU).write_bytes(data)
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert machine_of(GPU) == find(GPU)


class Boards:
    """What this rank's peers say, one exchange after the other."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def all_gather_bytes(self, own: bytes) -> list[bytes]:
        return [own, self.answers.pop(0).encode()]


@pytest.mark.parametrize(
    ("theirs", "machine", "basis"),
    [
        (("same", "h200x4"), "", "calibrated"),
        (("0123", "h200x4"), "h200x4", "nearest"),  # another file, of a GPU of 114 SMs
        (("same", "a100x8"), "a100x8", "nearest"),  # another GPU
    ],
)
def test_all_ranks_take_the_same(theirs: tuple[str, str], machine: str, basis: str, monkeypatch: pytest.MonkeyPatch):
    save_calibrated(GPU, FILE)
    own = machine_of(GPU)
    assert find(GPU).machine == "h200x4"
    board = Boards(own.digest if theirs[0] == "same" else theirs[0], theirs[1])
    monkeypatch.setattr(target, "Board", SimpleNamespace(of=lambda group: board))

    class Handle:
        """A process group, as far as it can be remembered."""

    found = agreed_machine(SimpleNamespace(process_group=Handle(), world_size=2), GPU)
    assert (found.machine, found.basis) == (machine or own.machine, basis)
