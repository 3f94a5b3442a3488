"""How much Python a module of a plan may be: functions entered, so that no busy machine decides."""

from __future__ import annotations

import json
import sys

import pytest

from tests.forked import run
from tests.source_tree import ROOT

# MEASURED: the numbers of commit 7e83ba7, of which a tenth more is allowed.
BEFORE = {
    "sequence, forward": 569,
    "sequence, forward and backward": 1317,
    "whole, forward": 363,
    "whole, forward and backward": 1223,
}


@pytest.mark.slow
def test_styles_enter_few_functions():
    answer = run(str(ROOT / "campaigns" / "host" / "host_styles.py"), "0")
    assert not answer.returncode, answer.stderr
    found = json.loads(answer.stdout.splitlines()[-1])
    assert {name: found[name][0] for name in BEFORE if found[name][0] > 1.1 * BEFORE[name]} == {}, sys.version
