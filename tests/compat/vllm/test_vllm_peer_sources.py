"""Where vLLM's own tests are fetched from: the indexes that pip knows, and files with the sum that the index has."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import pytest
import vllm_peer_sources
from vllm_peer_sources import distribution_link, ensure_peer_tests, indexes

from kvbaton.engines.vllm.setup.environment import VllmEnvironment
from kvbaton.errors import LocalError


def test_the_index_is_that_of_pip() -> None:
    assert indexes("") == ["https://pypi.org/simple"]
    assert indexes("global.index-url='https://there/simple'\nglobal.timeout='9'") == ["https://there/simple"]
    assert indexes(":env:.index-url='https://a/'\nglobal.extra-index-url='https://b https://c'") == [
        "https://a/",
        "https://b",
        "https://c",
    ]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index with one distribution of vLLM, which has a test and something else."""
    page = tmp_path / "index" / "vllm"
    content = tmp_path / "vllm-1.0"
    for name in ("tests/v1/test_it.py", "vllm/it.py"):
        (content / name).parent.mkdir(parents=True, exist_ok=True)
        (content / name).write_text(name)
    page.mkdir(parents=True)
    with tarfile.open(page / "vllm-1.0.tar.gz", "w:gz") as archive:
        archive.add(content, content.name)
    _link(page, hashlib.sha256((page / "vllm-1.0.tar.gz").read_bytes()).hexdigest())
    monkeypatch.setattr(vllm_peer_sources, "indexes", lambda _: [f"file://{tmp_path}/nowhere", f"file://{tmp_path}/index"])
    return page


def _link(page: Path, digest: str) -> None:
    (page / "index.html").write_text(f'<a href="other.whl">x</a><a href="./vllm-1.0.tar.gz#sha256={digest}">vllm</a>')


def test_only_the_tests_are_unpacked_and_fetched_once(index: Path, tmp_path: Path) -> None:
    reported: list[str] = []
    environment = VllmEnvironment(tmp_path / "cache")
    for _ in range(2):
        directory = ensure_peer_tests(environment, "1.0", reported.append)
    assert [path.relative_to(directory).as_posix() for path in directory.rglob("*.py")] == ["tests/v1/test_it.py"]
    assert len(reported) == 1


def test_a_file_that_has_another_sum_than_the_index_is_refused(index: Path, tmp_path: Path) -> None:
    _link(index, "0" * 64)
    with pytest.raises(LocalError, match="the index has 000"):
        ensure_peer_tests(VllmEnvironment(tmp_path / "cache"), "1.0", print)


def test_a_release_that_is_nowhere_is_named_with_the_indexes(index: Path) -> None:
    with pytest.raises(LocalError, match=r"vllm-2\.0\.tar\.gz is on none of .*nowhere, .*index"):
        distribution_link("vllm", "vllm-2.0.tar.gz")
