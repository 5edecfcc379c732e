"""A real Prometheus, as a process of its own: it scrapes what runs here, evaluates our rules and answers queries."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from kvbaton.launch.ports import PortPicker
from watching import wait_until

__all__ = ["Prometheus", "QueryError", "find_prometheus", "prometheus"]

_START_S = 60.0


def find_prometheus() -> str | None:
    """Prometheus of this machine; on Debian `apt-get install prometheus`."""
    return shutil.which("prometheus")


class QueryError(Exception):
    """Prometheus refuses a query."""


class Prometheus:
    """Its HTTP interface."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def range(self, query: str, start: float, end: float, step_s: float) -> list[dict[str, Any]]:
        """The series of a query between two moments. Raises QueryError."""
        found = self.ask("query_range", query=query, start=start, end=end, step=step_s)
        series: list[dict[str, Any]] = found["result"]
        return series

    def rules(self) -> dict[str, dict[str, Any]]:
        """The alert rules that it evaluates, by name."""
        return {rule["name"]: rule for group in self.ask("rules")["groups"] for rule in group["rules"]}

    def up(self) -> dict[str, str]:
        """How the last scrape of each target went: `up`, or the problem."""
        found = self.ask("targets", state="active")["activeTargets"]
        return {each["labels"]["instance"]: each["lastError"] or each["health"] for each in found}

    def ask(self, path: str, **parameters: Any) -> Any:
        """One call. Raises QueryError."""
        url = f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise QueryError(error.read().decode()) from error


@contextmanager
def prometheus(jobs: Mapping[str, Sequence[int]], rules: Path, interval_s: int = 1) -> Iterator[Prometheus]:
    """A Prometheus that scrapes these ports, by job, with a file of rules; gone afterwards, with all that it kept."""
    name = find_prometheus()
    assert name is not None
    port = PortPicker().pick()
    every = f"{interval_s}s"
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{each}" for each in ports]}]}
            for job, ports in jobs.items()
        ],
    }
    with tempfile.TemporaryDirectory(prefix="kvbaton-prometheus-") as folder:
        (Path(folder) / "prometheus.yml").write_text(yaml.safe_dump(config))
        log = Path(folder) / "log"
        options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with log.open("wb") as output:
            process = subprocess.Popen([name, *options, f"--web.listen-address=127.0.0.1:{port}"], stdout=output, stderr=output)
        made = Prometheus(port)

        def is_up() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return set(made.up().values()) == {"up"}
            except (OSError, QueryError):  # it reads its files first
                return False

        try:
            wait_until(is_up, "Prometheus scrapes every target", _START_S)
            yield made
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
