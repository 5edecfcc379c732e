"""`make watchers` names what it cannot install, and ends well: not every machine may install packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TOOL = Path(__file__).parents[3] / "tools" / "install_watchers.py"


def installed(path: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(_TOOL)], env={"PATH": str(path)}, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_nothing_is_done_where_both_are_there(tmp_path: Path) -> None:
    for name in ("chromium", "prometheus"):
        program(tmp_path, name, "exit 0")
    program(tmp_path, "apt-get", f"echo used > {tmp_path}/used; exit 1")
    assert installed(tmp_path) == "== chromium and prometheus are installed\n"
    assert not (tmp_path / "used").exists()


def test_what_will_not_be_tested_is_named(tmp_path: Path) -> None:
    program(tmp_path, "chromium", "exit 0")
    skipped = "so their tests in `make test-e2e` will be skipped\n"
    assert installed(tmp_path) == f"== NOT TESTED: no prometheus (there is no apt-get here), {skipped}"
    program(tmp_path, "apt-get", 'test "$1" = update || exit 100')
    assert installed(tmp_path).endswith(skipped)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs packages")
def test_an_install_that_fails_or_brings_nothing_is_named(tmp_path: Path) -> None:
    program(tmp_path, "apt-get", 'test "$1" = update || exit 100')
    assert "`apt-get install --yes --no-install-recommends chromium prometheus` has failed (100)" in installed(tmp_path)
    program(tmp_path, "apt-get", "exit 0")
    assert "chromium and prometheus cannot be found after that" in installed(tmp_path)
