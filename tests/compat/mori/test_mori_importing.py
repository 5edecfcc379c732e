"""The drop-in is found as `mori` when it is asked for, and only where no real one is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

_SHOW = "import mori, mori.io, mori.cpp; print(getattr(mori, '__kvbaton__', False), mori.io.IOEngine.__module__)"
_OURS = "True kvbaton.compat.mori.engine"


def _run(code: str, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if key != "KVBATON_MORI"} | environment
    return subprocess.run(
        [sys.executable, "-c", code], cwd=directory, env=variables, capture_output=True, text=True, timeout=120, check=False
    )


def _install(code: str) -> str:
    return f"from kvbaton.compat.mori import install; print(install()); {code}"


def _real_mori(directory: Path) -> None:
    for name, text in (("__init__", ""), ("io", "class IOEngine: pass"), ("cpp", "")):
        (directory / "mori").mkdir(exist_ok=True)
        (directory / "mori" / f"{name}.py").write_text(text)


def test_it_is_mori_once_it_is_installed(tmp_path: Path) -> None:
    assert _run(_install(_SHOW), tmp_path).stdout.split("\n")[:2] == ["True", _OURS]
    twice = "from kvbaton.compat.mori import install; install(); " + _install(_SHOW)
    assert _run(twice, tmp_path).stdout.split("\n")[:2] == ["True", _OURS]


def test_it_is_not_mori_unless_it_is_installed(tmp_path: Path) -> None:
    assert "No module named 'mori'" in _run("import kvbaton.compat.mori; " + _SHOW, tmp_path).stderr


def test_a_real_mori_wins(tmp_path: Path) -> None:
    _real_mori(tmp_path)
    assert _run(_install(_SHOW), tmp_path).stdout.split("\n")[:2] == ["False", "False mori.io"]


@pytest.mark.parametrize("first", ["", "import mori; "], ids=["not imported", "imported"])
def test_a_directory_without_code_does_not(tmp_path: Path, first: str) -> None:
    (tmp_path / "mori" / "io").mkdir(parents=True)
    assert _run(first + _install(_SHOW), tmp_path).stdout.split("\n")[:2] == ["True", _OURS]


def test_parts_are_loaded_when_they_are_named(tmp_path: Path) -> None:
    code = _install("import mori; print(mori.io.StatusCode.SUCCESS, mori.cpp.TransferStatus().Init()); mori.shmem")
    ended = _run(code, tmp_path)
    assert ended.stdout.split("\n")[1] == "StatusCode.SUCCESS True"
    assert "has io, cpp, ops only, not 'shmem'" in ended.stderr


def test_what_vllm_mentions_of_other_parts_is_there_and_cannot_be_used(tmp_path: Path) -> None:
    code = _install("import importlib.util as u; print(bool(u.find_spec('mori'))); import mori; mori.ops.EpDispatchCombineOp()")
    ended = _run(code, tmp_path)
    assert ended.stdout.split("\n")[1] == "True"
    assert "expert-parallel kernels need AMD's mori" in ended.stderr


_ACTIVATE = "from kvbaton.compat.mori import activate; activate(); "


@pytest.mark.parametrize("value", ["1", "auto", "local", "tcp"])
def test_the_entry_point_installs_when_the_variable_is_set(tmp_path: Path, value: str) -> None:
    assert _run(_ACTIVATE + _SHOW, tmp_path, KVBATON_MORI=value).stdout.strip() == _OURS


@pytest.mark.parametrize("value", [None, "", "0", "off"])
def test_the_entry_point_does_nothing_otherwise(tmp_path: Path, value: str | None) -> None:
    variables = {} if value is None else {"KVBATON_MORI": value}
    code = "import sys; before = list(sys.meta_path); " + _ACTIVATE + "print(sys.meta_path == before, 'numpy' in sys.modules)"
    assert _run(code, tmp_path, **variables).stdout.strip() == "True False"


def test_with_a_real_mori_the_entry_point_says_so(tmp_path: Path) -> None:
    _real_mori(tmp_path)
    ended = _run(_ACTIVATE + _SHOW, tmp_path, KVBATON_MORI="1")
    assert ended.stdout.strip() == "False mori.io"
    assert "a real mori is installed" in ended.stderr


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_both_engines_find_the_entry_point(group: str) -> None:
    points = [point for point in metadata.entry_points(group=group) if point.name == "kvbaton_mori"]
    if not points:
        pytest.skip("kvbaton is not installed with this checkout's metadata; run make install")
    assert points[0].value == "kvbaton.compat.mori.importing:activate"


def test_the_mori_transport_refuses_to_run_on_it(tmp_path: Path) -> None:
    code = _install("from kvbaton.transport.mori import load_mori; load_mori()")
    assert "kvbaton's own: choose local, tcp or auto" in _run(code, tmp_path).stderr
