"""JSON files: exact both ways; whatever is hostile is refused with one error, quickly and without much memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overweave.errors import ScheduleFileError
from overweave.ir.plan import Plan
from overweave.ir.problem import Problem
from overweave.ir.text.files import from_json, read_file, to_json
from overweave.ir.text.forms import MAX_BYTES
from overweave.ir.text.parse import to_text
from overweave.schedules.catalog.catalog import build
from tests.clock import ends_within

PROBLEM = Problem(operator="all_gather_matmul", m=64, n=32, k=16, world_size=2, dtype="bfloat16")
PLAN = build("all_gather_matmul.pull", PROBLEM, {"block_m": 16})


def test_plans_and_schedules_come_back():
    plan, schedule = from_json(to_json(PLAN)), from_json(to_json(PLAN.schedule))
    assert plan == PLAN
    assert schedule == PLAN.schedule
    assert isinstance(plan, Plan)
    assert plan.tile_orders[0].rows[0].row_end == PLAN.tile_orders[0].rows[0].row_end


def test_an_operations_dependences_stand_in_its_waits():
    operations = json.loads(to_json(PLAN.schedule))["schedule"]["operations"]
    assert {"pad": "told", "signals": [0, 1], "count": 1} in operations[1]["waits"]


def edited(edit) -> bytes:
    envelope = json.loads(to_json(PLAN))
    edit(envelope)
    return json.dumps(envelope).encode()


def twin(text: bytes, key: bytes) -> bytes:
    """The first object that has `key` gets it twice, with the same value."""
    at = text.index(b'"' + key + b'"')
    end = text.index(b",", at)
    return text[: end + 1] + text[at : end + 1] + text[end + 1 :]


GOOD = json.dumps(json.loads(to_json(PLAN))).encode()
HOSTILE = {
    "empty": b"",
    "cut": GOOD[:-20],
    "not utf-8": GOOD.replace(b"stage.0", b"stage.\xff", 1),
    "nan": GOOD.replace(b'"count": 1', b'"count": NaN', 1),
    "infinity": GOOD.replace(b'"count": 1', b'"count": 1e999', 1),
    "fraction": GOOD.replace(b'"count": 1', b'"count": 1.5', 1),
    "too large a number": GOOD.replace(b'"count": 1', b'"count": 2147483648', 1),
    "a very long number": GOOD.replace(b'"count": 1', b'"count": ' + b"9" * 100_000, 1),
    "negative": GOOD.replace(b'"count": 1', b'"count": -1', 1),
    "true": GOOD.replace(b'"count": 1', b'"count": true', 1),
    "unknown key": edited(lambda e: e["plan"].update(run="this")),
    "unknown key within": edited(lambda e: e["plan"]["schedule"]["operations"][0].update(run="this")),
    "twin key": twin(GOOD, b"count"),
    "twin key at the top": twin(GOOD, b"version"),
    "twin key, one escaped": GOOD.replace(b'"count": 1', b'"count": 1, "c\\u006funt": 1', 1),
    "unknown kind": GOOD.replace(b'"kind": "get"', b'"kind": "steal"', 1),
    "bad name": edited(lambda e: e["plan"]["schedule"]["buffers"][0].update(name="../x")),
    "long name": edited(lambda e: e["plan"]["schedule"]["buffers"][0].update(name="x" * 65)),
    "another version": edited(lambda e: e.update(version=2)),
    "no version": edited(lambda e: e.pop("version")),
    "nothing inside": b'{"version": 1}',
    "both": edited(lambda e: e.update(schedule=e["plan"]["schedule"])),
    "a bracket in a string": edited(lambda e: e["plan"]["schedule"]["buffers"][0].update(name="x[")),
    "a list": b"[]",
    "a word": b"null",
    "more behind": GOOD + b"{}",
    "a tile far out": edited(lambda e: e["plan"]["tile_orders"][0]["rows"][0].__setitem__(1, 2**31)),
    "a short tile": edited(lambda e: e["plan"]["tile_orders"][0]["rows"][0].__delitem__(slice(10, None))),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_files_are_refused(data: bytes):
    assert data != GOOD
    with pytest.raises(ScheduleFileError):
        from_json(data)


MILLION = 1_000_000
LARGE = {
    "deep lists": b"[" * 3 * MILLION,
    "deep objects": b'{"a":' * MILLION,
    "deep behind a key that is skipped": b'{"version": 1, "schedule": {"x": ' + b"[" * MILLION + b"]" * MILLION + b"}}",
    "a string that never ends": b'{"' + b'\\"' * MILLION + b"\\",
    "wide": b'{"version": 1, "schedule": [' + b"[]," * MILLION + b"[]]}",
    "too large": b" " * (MAX_BYTES + 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("data", LARGE.values(), ids=LARGE.keys())
def test_large_files_are_refused_quickly_and_without_much_memory(data: bytes):
    def refuse() -> None:
        with pytest.raises(ScheduleFileError, match=r"brackets|more than|malformed|Expected"):
            from_json(data)

    tracemalloc.start()
    refuse()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * len(data)
    ends_within(1, refuse)


def test_depth_is_judged_before_anything_is_decoded():
    with pytest.raises(ScheduleFileError, match="nest more than 16 deep"):
        from_json(b'{"version": 9, "x": ' + b"[" * 16 + b"]" * 16 + b"}")
    with pytest.raises(ScheduleFileError, match="version"):
        from_json(b'{"version": 9, "x": ' + b"[" * 15 + b"]" * 15 + b"}")


def test_a_file_is_read_by_what_it_begins_with(tmp_path: Path):
    files = {"plan.json": to_json(PLAN), "schedule.txt": to_text(PLAN.schedule).encode()}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert read_file(tmp_path / "plan.json") == PLAN
    assert read_file(tmp_path / "schedule.txt") == PLAN.schedule


@pytest.mark.parametrize("data", [None, b"\xff\xfe", b"", b"schedule \xff", b"x" * (MAX_BYTES + 1)])
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, data: bytes | None):
    path = tmp_path / "file"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ScheduleFileError):
        read_file(path)
    with pytest.raises(ScheduleFileError):
        read_file(tmp_path)
    with pytest.raises(ScheduleFileError):
        read_file(Path("a\0b"))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_file_is_refused_or_read_and_never_anything_else(data: st.DataObject):
    at, length = data.draw(st.integers(0, len(GOOD))), data.draw(st.integers(0, 12))
    changed = GOOD[:at] + data.draw(st.binary(max_size=6)) + GOOD[at + length :]
    try:
        value = from_json(changed)
    except ScheduleFileError:
        return
    assert from_json(to_json(value)) == value


@pytest.mark.parametrize(
    ("name", "data"), [("a.json", b"{"), ("a.txt", b"schedule"), ("a.txt", b"\xff"), ("absent", b"")]
)
def test_what_is_wrong_with_a_file_is_told_with_its_name(name: str, data: bytes, tmp_path: Path):
    if data:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ScheduleFileError, match=name):
        read_file(tmp_path / name)
