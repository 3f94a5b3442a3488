"""Machine descriptions: every number has a source, curves are sane, mistakes are named."""

from __future__ import annotations

import msgspec
import pytest

from overweave.errors import InputError
from overweave.hardware.machine import load, names
from overweave.hardware.topology import Curve, SmCurve

COUNTS = ("gpus", "between")  # how many GPUs there are, and which of them a link joins


def walk(value: object, path: str = ""):
    """(path, dict) of every object in a decoded JSON value."""
    if isinstance(value, dict):
        yield path, value
        for key, child in value.items():
            yield from walk(child, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, child in enumerate(value):
            yield from walk(child, f"{path}[{number}]")


def is_number(value: object) -> bool:
    """A number, or points of a curve."""
    if isinstance(value, tuple | list):
        return any(is_number(each) for each in value)
    return isinstance(value, int | float)


@pytest.mark.parametrize("name", names())
def test_every_number_has_a_source(name: str):
    for path, record in walk(msgspec.to_builtins(load(name))):
        numbers = [key for key, value in record.items() if is_number(value) and key not in COUNTS]
        assert not numbers or record.get("source"), f"{path} has {numbers} without a source"


@pytest.mark.parametrize("name", names())
def test_a_larger_transfer_never_takes_less_time(name: str):
    links = load(name).links
    sizes = [2**power for power in range(8, 31)]
    for curve in (links.push, links.pull, links.all_peers):
        times = [curve.time_us(size) for size in sizes]
        assert times == sorted(times)


def test_what_sms_push_grows_in_proportion_then_between_points_then_no_more():
    curve = SmCurve(points=((4.0, 100.0), (8.0, 160.0)), source="")
    assert [curve.gb_per_s(sms) for sms in (1, 4, 6, 8, 100)] == [25.0, 100.0, 130.0, 160.0, 160.0]


def test_a_curve_has_a_floor_its_points_and_a_last_rate():
    curve = Curve(points=((1000, 1.0), (3000, 2.0)), source="")
    assert curve.time_us(10) == curve.time_us(1000) == 1.0
    assert curve.time_us(2000) == pytest.approx(1.25)  # half way from 1 us to 1.5 us
    assert curve.time_us(6000) == pytest.approx(3.0)
    assert curve.peak_gb_per_s == 2.0


def test_collectives_of_unmeasured_group_sizes_follow_the_nearest():
    machine = load("h200x4")
    two, three, four = (machine.collective_us("all_gather", world, 2**26) for world in (2, 3, 4))
    assert four == pytest.approx(190, rel=0.01)
    assert two == pytest.approx(159, rel=0.01)
    assert 0 < three < four
    assert machine.collective_us("all_gather", 1, 2**26) == 0.0


def test_an_unlisted_tile_shape_takes_the_nearest_in_reuse():
    machine = load("h200x4")
    assert machine.tile("hopper", 128, 256).block_n == 256
    assert machine.tile("portable", 32, 64).block_m == 64


def test_mistakes_are_named():
    with pytest.raises(InputError, match="h200x4"):
        load("abacus")
    with pytest.raises(InputError, match="bfloat16"):
        load("h200x4").dtype_share("int4")
    with pytest.raises(InputError, match="hopper"):
        load("h200x4").tile("abacus", 128, 128)
    with pytest.raises(InputError, match="reduce_scatter"):
        load("h200x4").collective_us("all_to_all", 4, 2**20)
