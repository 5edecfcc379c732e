"""The backend's classes on SGLang's own pools and buffers, in SGLang's environment.

`inside/class_checks.py`, `inside/state_checks.py` and `inside/reported_checks.py` have the checks.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from sglang_stand import ready

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

_CHECKS = Path(__file__).parent / "inside" / "class_checks.py"
_SOURCES = [_CHECKS.with_name(f"{kind}_checks.py").read_text() for kind in ("class", "state", "reported")]
_LISTS = [text.partition("CHECKS = (")[2].partition("\n)")[0] for text in _SOURCES]
_NAMES = re.findall(r"^    (\w+),$", "\n".join(_LISTS), re.MULTILINE)


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What every check found."""
    environment = ready()
    ran = subprocess.run(
        [str(environment.python), str(_CHECKS)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environment.variables()},
        check=False,
    )
    assert ran.stdout.strip(), ran.stderr[-3000:]
    results: dict[str, str] = json.loads(ran.stdout.strip().splitlines()[-1])
    return results


@pytest.mark.parametrize("check", _NAMES)
def test_on_sglangs_own_classes(found: dict[str, str], check: str) -> None:
    assert found[check] == ""
