"""Makes a failing script smaller: drops requests and faults, one after the other, as long as the same rule stays broken."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvbaton.sim.instance import Bugs
from kvbaton.sim.run import run_script
from kvbaton.sim.script import Script

__all__ = ["shrink"]

_MAX_RUNS = 400


def shrink(script: Script, rule: str, bugs: Bugs) -> Script:
    """The smallest script found, within a bounded number of runs, that still breaks `rule`."""
    runs = 0
    is_smaller = True
    while is_smaller and runs < _MAX_RUNS:
        is_smaller = False
        for candidate in _smaller(script):
            runs += 1
            if _breaks(candidate, rule, bugs):
                script, is_smaller = candidate, True
                break
            if runs >= _MAX_RUNS:
                break
    return script


def _breaks(script: Script, rule: str, bugs: Bugs) -> bool:
    return any(violation.rule == rule for violation in run_script(script, bugs).violations)


def _smaller(script: Script) -> Iterator[Script]:
    for index in range(len(script.faults)):
        faults = script.faults[:index] + script.faults[index + 1 :]
        yield msgspec.structs.replace(script, faults=faults)
    for index in range(len(script.requests) if len(script.requests) > 1 else 0):
        requests = script.requests[:index] + script.requests[index + 1 :]
        yield msgspec.structs.replace(script, requests=requests)
    if script.ranks > 1:
        yield msgspec.structs.replace(script, ranks=1)
    if script.layers > 1:
        yield msgspec.structs.replace(script, layers=1)
