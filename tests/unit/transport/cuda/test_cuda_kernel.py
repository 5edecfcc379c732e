"""The real kernel, interpreted: needs torch and Triton, but no GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("torch", "triton")), reason="needs the extra kvbaton[cuda]"
)
def test_the_kernel_copies_exactly_the_runs() -> None:
    ended = subprocess.run([sys.executable, str(HERE / "interpreted.py")], stderr=subprocess.PIPE, timeout=110, check=False)
    assert (ended.returncode, ended.stderr.decode()) == (0, "")
