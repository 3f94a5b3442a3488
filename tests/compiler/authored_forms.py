"""Kernels as public ones are written, with directives alone, touch what these say.

Run by test_authored.py in a process of its own: where triton has been imported for compiling it cannot interpret.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from overweave.ops.author.trial import CHECKED, check_footprint  # noqa: E402
from tests.compiler.untruths.public_forms import FORMS  # noqa: E402
from tests.compiler.untruths.public_rows import Form  # noqa: E402
from tests.compiler.untruths.trials import try_in_copies  # noqa: E402

try_in_copies()


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_a_true_kernel_touches_what_it_says(tmp_path: Path, form: Form):
    assert check_footprint(form.read(tmp_path), form.given()) == CHECKED
