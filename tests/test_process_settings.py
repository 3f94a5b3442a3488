"""What `ow.settings` and its variables set, and what they refuse."""

from __future__ import annotations

import pytest

import overweave as ow
from overweave.errors import InputError
from overweave.process_settings import MOST_MARGIN, ProcessSettings, current, of_environment
from overweave.tuner.space.target import Target, with_margin


def test_a_block_gives_back_what_it_found():
    before = current()
    with ow.settings(sm_margin=4) as outer:
        with ow.settings(batch_invariant=True):
            assert current() == (True, 4)
        assert current() == outer
    assert current() == before


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ProcessSettings()),
        ({"OVERWEAVE_BATCH_INVARIANT": "1"}, ProcessSettings(batch_invariant=True)),
        ({"OVERWEAVE_BATCH_INVARIANT": "0", "VLLM_BATCH_INVARIANT": "1"}, ProcessSettings(batch_invariant=True)),
        ({"OVERWEAVE_SM_MARGIN": "16", "VLLM_BATCH_INVARIANT": ""}, ProcessSettings(sm_margin=16)),
    ],
)
def test_variables(variables: dict[str, str], expected: ProcessSettings):
    assert of_environment(variables) == expected


@pytest.mark.parametrize("name", ["OVERWEAVE_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT", "OVERWEAVE_SM_MARGIN"])
@pytest.mark.parametrize("value", ["yes", "-1", "99999"])
def test_other_values_of_variables_are_refused(name: str, value: str):
    with pytest.raises(InputError, match=name):
        of_environment({name: value})


@pytest.mark.parametrize("given", [{"sm_margin": -1}, {"sm_margin": MOST_MARGIN + 1}, {"batch_invariant": 1}])
def test_other_values_are_refused_and_set_nothing(given: dict[str, int]):
    before = current()
    with pytest.raises(InputError, match="settings"):
        ow.settings(**given)  # type: ignore[arg-type]
    assert current() == before


def test_tiles_are_shaped_for_the_sms_that_are_left():
    with ow.settings(sm_margin=32):
        assert with_margin(Target("cuda")).sms == 100
        assert ow.explain("all_gather_matmul", m=16384, n=8192, k=4096, world_size=4).options["sms"] == 100
        assert with_margin(Target("cpu")).sms == 132
    with ow.settings(sm_margin=132), pytest.raises(InputError, match="132 SMs free"):
        with_margin(Target("cuda"))


def test_report_says_what_is_set():
    assert "settings" not in str(ow.report())
    with ow.settings(sm_margin=8):
        assert "settings: batch_invariant=False sm_margin=8" in str(ow.report())
