"""Fetches what vLLM has in its source distribution only: its own tests, and its toy proxy. It is asked for where pip would."""

from __future__ import annotations

import hashlib
import html.parser
import shutil
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO

from kvbaton.engines.vllm.setup.environment import VllmEnvironment
from kvbaton.errors import LocalError
from kvbaton.launch.installing import alone, run_logged

__all__ = ["distribution_link", "ensure_packages", "ensure_peer_tests", "ensure_toy_proxy", "indexes"]

Report = Callable[[str], None]

_DEFAULT_INDEX = "https://pypi.org/simple"
_LIMIT_S = 600.0
_TOY_PROXY = "examples/disaggregated/disaggregated_serving/moriio_toy_proxy_server.py"


def ensure_peer_tests(environment: VllmEnvironment, version: str, report: Report) -> Path:
    """A directory with the folder `tests` of that release, fetched first if need be. Raises LocalError."""
    return _ensure_files(environment, version, "tests/", "fetched", report)


def ensure_toy_proxy(environment: VllmEnvironment, version: str, report: Report) -> Path:
    """The file of the proxy for MoRI-IO of that release, fetched first if need be. Raises LocalError."""
    return _ensure_files(environment, version, _TOY_PROXY, "toy-proxy-fetched", report) / _TOY_PROXY


def _ensure_files(environment: VllmEnvironment, version: str, prefix: str, mark: str, report: Report) -> Path:
    directory = environment.directory / "peer-tests" / version
    directory.mkdir(parents=True, exist_ok=True)
    with alone(directory / "lock", "fetching vLLM's sources", _LIMIT_S):
        if not (directory / mark).exists():
            report(f"fetching the sources of vLLM {version}, for {prefix} (about 45 MB; only this once)")
            archive = directory / "sources.tar.gz"
            _fetch(distribution_link("vllm", f"vllm-{version}.tar.gz"), archive)
            _unpack(archive, directory, prefix)
            archive.unlink()
            (directory / mark).touch()
    return directory


def ensure_packages(environment: VllmEnvironment, report: Report, *packages: str) -> Path:
    """A directory with these packages for vLLM's interpreter, beside its environment, which stays as users get it."""
    directory = environment.directory / "peer-tests" / "-".join(each.replace("==", "-") for each in packages)
    directory.mkdir(parents=True, exist_ok=True)
    with alone(directory / "lock", f"installing {packages[0]}", _LIMIT_S):
        if not (directory / "installed").exists():
            report(f"installing {', '.join(packages)} in {directory}")
            pip = [str(environment.python), "-m", "pip", "install", "--upgrade", "--target", str(directory / "packages")]
            run_logged([*pip, *packages], directory / "install.log", f"installing {packages[0]}", _LIMIT_S)
            (directory / "installed").touch()
    return directory / "packages"


def indexes(settings: str) -> list[str]:
    """The package indexes that pip would ask, from what `pip config list` prints."""
    found: dict[str, list[str]] = {}
    for line in settings.splitlines():
        key, _, value = line.partition("=")
        found.setdefault(key.rpartition(".")[2], []).extend(value.strip().strip("'\"").split())
    return [*(found.get("index-url") or [_DEFAULT_INDEX]), *found.get("extra-index-url", [])]


def distribution_link(package: str, name: str) -> str:
    """Where the index has this file of the package. Raises LocalError that names the indexes asked."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    settings = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False).stdout
    asked = indexes(settings)
    for index in asked:
        page = f"{index.rstrip('/')}/{package}/" + ("index.html" if index.startswith("file:") else "")
        for link in _links(page):
            if urllib.parse.urlsplit(link).path.rpartition("/")[2] == name:
                return link
    raise LocalError(f"{name} is on none of the package indexes asked: {', '.join(asked)}")


class _Hrefs(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _links(page: str) -> list[str]:
    """What a page of an index links to; nothing where there is no such page."""
    request = urllib.request.Request(page, headers={"Accept": "text/html"})
    try:
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            parser = _Hrefs()
            parser.feed(answer.read().decode(errors="replace"))
    except (OSError, ValueError):
        return []
    return [urllib.parse.urljoin(page, href) for href in parser.found]


def _fetch(link: str, path: Path) -> None:
    """Download, and compare with the sum in the link, if it has one."""
    plain, _, fragment = link.partition("#")
    try:
        with urllib.request.urlopen(plain, timeout=60.0) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except OSError as error:
        raise LocalError(f"fetching {plain} failed: {error}") from error
    expected = urllib.parse.parse_qs(fragment).get("sha256", [""])[0]
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if expected and got != expected:
        raise LocalError(f"fetching {plain} failed: its sha256 is {got}, and the index has {expected}; try again")


def _unpack(archive: Path, directory: Path, prefix: str) -> None:
    """Only what begins with `prefix`, without the folder that holds it all."""
    with tarfile.open(archive) as content:
        for member in content:
            _, _, inner = member.name.partition("/")
            if member.isfile() and inner.startswith(prefix):
                _write(content.extractfile(member), directory / inner, within=directory)


def _write(content: IO[bytes] | None, path: Path, *, within: Path) -> None:
    """By hand: the filters of `tarfile` are younger than some Python 3.11, and an archive may name any path."""
    if content is None or not path.resolve().is_relative_to(within.resolve()):
        raise LocalError(f"the archive has a file that would not be in {within}: {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        shutil.copyfileobj(content, file)
