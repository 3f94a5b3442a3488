"""What the campaign asks for and how its times are read; no GPU is needed for either."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from campaigns.rates.gpu_tile_choice import (
    LEAST_ROWS,
    OPERATORS,
    candidates,
    configs,
    local_shapes,
    verdict,
)
from campaigns.rates.tile_fit import Record, Times, Wave, chosen, fitted, nearness, steps_of
from overweave.ir.plan import MatmulConfig, split_obstacle
from overweave.schedules.tiles.shape import HOPPER, count_tiles

FIRST = HOPPER[0].config


def test_a_slow_tile_among_quick_ones_is_no_pass():
    assert verdict([0.98, 0.99], "").holds
    assert not verdict([0.98, 0.95], "").holds
    assert not verdict([*[1.0] * 20, 0.89], "").holds


def test_what_the_operators_leave_to_the_library_is_told_and_not_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shapes_of = ", ".join(f'{{"name": "{n}", "m": 1024, "n": {n}, "k": 1024}}' for n in (4000, 4096))
    (tmp_path / "odd.json").write_text(f'{{"cases": [{shapes_of}]}}')
    found = list(local_shapes([str(tmp_path / "odd.json")], 4))
    assert found == [(1024, 1000, 1024), (1024, 1024, 1024), (1024, 4000, 256), (1024, 4096, 256)]
    (tmp_path / "odd.json").write_text(f'{{"cases": [{shapes_of.replace("4000", "4004")}]}}')
    assert list(local_shapes([str(tmp_path / "odd.json")], 4)) == [(1024, 1024, 1024), (1024, 4096, 256)]
    told = capsys.readouterr().out.splitlines()
    assert [line.split(": no tile kernel: ")[0] for line in told] == [f"{one} 4004" for one in OPERATORS]
    assert all("rows must start at multiples of 16 bytes" in line for line in told)


def test_what_is_chosen_is_timed():
    for shape in local_shapes(["llm_layers"], 4, range(LEAST_ROWS, 1025)):
        timed = candidates(shape, 132)
        assert len(timed) == len(set(timed))
        assert chosen(shape, 132) in timed


def test_every_tile_shape_is_tried_once_and_can_be():
    assert len(configs()) == len(set(configs()))
    assert not [config for config in configs() if split_obstacle(config)]
    assert {(config.block_n, config.split_n) for config in configs()} >= {(192, 3), (256, 2), (256, 4)}


def modelled(shape: tuple[int, int, int], waves: dict[MatmulConfig, Wave], sms: int = 132) -> Times:
    """Times as the model has them."""
    m, n, k = shape
    us = {
        config: wave.us(-(-count_tiles((m,), n, config).tiles // sms), steps_of(k, config))
        for config, wave in waves.items()
    }
    return Times(m, n, k, 1.0, us)


def test_a_fit_finds_the_constants_that_times_were_made_of():
    waves = {FIRST: Wave(6.0, 3.0, 0.7), replace(FIRST, block_n=128, stages=5): Wave(6.0, 2.0, 0.37)}
    sizes = ((512, 7168, 4096), (1024, 4096, 8192), (512, 8192, 896), (1024, 8192, 2048), (2048, 8192, 1024))
    found = [modelled(size, waves) for size in (*sizes, (2048, 8192, 4096), (4096, 8192, 1024), (8192, 8192, 512))]
    records = [msgspec.json.decode(msgspec.json.encode(times.record()), type=Record) for times in found]
    assert [record.times for record in records] == found
    for config, wave in waves.items():
        assert fitted(found, config, 132) == pytest.approx(wave)


def test_what_the_model_takes_is_held_against_the_best_that_it_knows():
    taken = chosen((1024, 4096, 4096), 132)
    other = next(one.config for one in HOPPER if one.config != taken)
    unknown = replace(other, stages=other.stages + 1)
    us = {taken: 4.0, other: 3.0, unknown: 1.0}
    assert nearness([Times(1024, 4096, 4096, 1.0, us)], 132) == "0.7500 of the best over 1, the worst 0.750"
