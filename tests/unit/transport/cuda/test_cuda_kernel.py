"""The real kernel, interpreted: needs torch and Triton, but no GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def needs_what() -> str:
    """Why the kernel cannot be interpreted here; empty when it can. Older interpreters make no pointers of numbers."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "triton")):
        return "needs the extra kvbaton[cuda]"
    version = importlib.metadata.version("triton")
    return "" if tuple(int(part) for part in version.split(".")[:2]) >= (3, 9) else f"needs Triton 3.9, not {version}"


@pytest.mark.skipif(bool(needs_what()), reason=needs_what())
def test_the_kernel_copies_exactly_the_runs() -> None:
    ended = subprocess.run([sys.executable, str(HERE / "interpreted.py")], stderr=subprocess.PIPE, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
