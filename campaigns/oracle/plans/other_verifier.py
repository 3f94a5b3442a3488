"""The verifier of another checkout, asked plan by plan in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from overweave.ir.plan import Plan
from overweave.ir.verify.rules.verdict import Refusal, Verdict

# Runs in the other checkout: the names that both have.
ANSWER = """
import json, sys, msgspec
from overweave.ir.plan import Plan
from overweave.ir.verify.plan import MachineLimits, verify_plan
for line in sys.stdin:
    try:
        verdict = verify_plan(msgspec.json.decode(line, type=Plan), MachineLimits())
        said = [[one.rule, one.message] for one in verdict.refusals]
    except msgspec.ValidationError as error:
        said = [["unknown", str(error)]]
    print(json.dumps(said), flush=True)
"""


class OtherVerifier:
    """Call it with a plan, within `with`. A plan that the other checkout cannot read counts as refused."""

    def __init__(self, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", ANSWER],
            cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> OtherVerifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()

    def __call__(self, plan: Plan) -> Verdict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(lean(plan)).decode() + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        refusals = [Refusal(rule, None, None, None, message) for rule, message in answer]
        return Verdict(plan.name, tuple(refusals))


def lean(value: Any) -> Any:
    """A value as JSON has it, without fields that have their defaults: another commit may not know them."""
    if isinstance(value, Struct):
        tag = value.__struct_config__.tag
        fields = {} if tag is None else {str(value.__struct_config__.tag_field): tag}
        for field in msgspec.structs.fields(value):
            its = getattr(value, field.name)
            default = field.default if field.default is not msgspec.NODEFAULT else UNSET
            if its != default:
                fields[field.name] = lean(its)
        return fields
    if isinstance(value, tuple | list):
        return [lean(one) for one in value]
    return value
