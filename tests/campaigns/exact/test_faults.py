"""The fault campaign, cut short."""

from __future__ import annotations

import pytest

from campaigns.exact import faults


@pytest.mark.slow
@pytest.mark.parametrize("trial", list(faults.trials(6, "library", seed=5)), ids=str)
def test_faults_are_handled(trial: faults.Trial):
    reasons, _ = faults.run(trial)
    assert reasons == []
