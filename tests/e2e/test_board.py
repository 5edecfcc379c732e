"""Board and alert rules as they are, in a real Prometheus that scrapes a real deployment; a picture from the JSON of the board.

No Grafana can be had from the package registries, so a page of the tests draws the panels (`board.html`), in a real browser.
"""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import browser, find_browser
from prometheus import Prometheus, QueryError, find_prometheus, prometheus
from system import Stand

from vllm_series import vllm_pages
from watching import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_prometheus() is None, reason="no Prometheus here; on Debian: apt-get install prometheus"),
]

_DEPLOY = Path(__file__).parents[2] / "deploy"
_BOARD = json.loads((_DEPLOY / "grafana" / "kvbaton.json").read_text())
_RULES = _DEPLOY / "prometheus" / "alerts.yml"
_PANELS = [panel for panel in _BOARD["panels"] if panel["type"] != "row"]
_RATE_S = 5
_SHOWN_S = 30
_VARIABLES = {"$__rate_interval": f"{_RATE_S}s", "$job": ".*", "$instance": ".*"}
_WAIT_S = 60.0
_MOST_SCRAPES = 600
_QUIET = {"Failures by cause", "Must stay 0"}
"""Panels with queries of what has not happened here."""
PICTURES = os.environ.get("KVBATON_PICTURES")
"""A directory in which a picture of the board is kept."""


class _VllmPages(http.server.BaseHTTPRequestHandler):
    """The page of a vLLM, one step later at every scrape."""

    pages: Iterator[str]

    def do_GET(self) -> None:
        content = next(self.pages).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Silent."""


@contextmanager
def vllm() -> Iterator[int]:
    """Serves them; the port."""
    _VllmPages.pages = iter(vllm_pages(_MOST_SCRAPES))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _VllmPages)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class Watched:
    """A deployment with load on it, and the Prometheus that watches it."""

    def __init__(self, stand: Stand, watcher: Prometheus) -> None:
        self.stand, self.prometheus = stand, watcher
        self.began = self.end = time.time()

    def panel(self, panel: dict[str, Any], end: float) -> list[list[dict[str, Any]]]:
        """What each query of a panel shows of the time up to `end`. Raises QueryError."""
        return [self.prometheus.range(filled(each["expr"]), end - _SHOWN_S, end, 1) for each in panel["targets"]]

    def show(self) -> dict[str, list[list[dict[str, Any]]]]:
        """What each panel shows after a few more requests; empty while one of them lacks something."""
        self.complete()
        self.end = time.time()
        answers = {panel["title"]: self.panel(panel, self.end) for panel in _PANELS}
        return answers if {title for title, found in answers.items() if not all(found)} <= _QUIET else {}

    def complete(self) -> None:
        """A few requests at once: long ones, and one that the decode instance computes by itself."""
        prompts = [f"{index} {time.monotonic()} " + "a prompt that is long enough to be handed over " * 4 for index in range(3)]
        asked = [threading.Thread(target=self.stand.client.complete, args=(each,), daemon=True) for each in (*prompts, "short")]
        for each in asked:
            each.start()
        for each in asked:
            each.join(_WAIT_S)


def filled(expression: str) -> str:
    """An expression of the board as Grafana sends it."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with Stand(router_arguments=("--local-prefill-chars", "16")) as stand, vllm() as vllm_port:
        ports = {role: stand.start(role, role) for role in ("prefill", "decode")}
        stand.wait_for("live", 2)
        jobs = {"router": [stand.router_port], "instances": list(ports.values()), "vllm": [vllm_port]}
        with prometheus(jobs, _RULES) as watcher:
            made = Watched(stand, watcher)
            while PICTURES and time.time() < made.began + _SHOWN_S:  # the time that the board shows
                made.complete()
            yield made


def test_prometheus_evaluates_every_rule_and_none_fires_where_all_is_well(watched: Watched) -> None:
    rules = watched.prometheus.rules()
    assert len(rules) == _RULES.read_text().count("- alert:")
    wait_until(lambda: all(each["health"] == "ok" for each in watched.prometheus.rules().values()), "all were evaluated")
    assert {name: each["state"] for name, each in rules.items() if each["state"] != "inactive"} == {}


def test_a_query_that_is_wrong_is_refused(watched: Watched) -> None:
    """The control of what follows."""
    with pytest.raises(QueryError, match="parse error"):
        watched.prometheus.range("sum by (le (rate(kvbaton_x[5s])))", time.time() - 5, time.time(), 1)


def test_every_panel_shows_what_a_deployment_reports(watched: Watched, tmp_path: Path) -> None:
    answers: dict[str, list[list[dict[str, Any]]]] = {}

    def is_shown() -> bool:
        answers.update(watched.show())
        return bool(answers)

    wait_until(is_shown, "every panel shows something", _WAIT_S)
    end = watched.end
    if find_browser() is None:
        pytest.skip("no Chromium here; on Debian: apt-get install chromium")
    with browser() as page:
        page.open((Path(__file__).parent / "board.html").as_uri())
        drawn = page.run(f"draw({json.dumps(_BOARD)}, {json.dumps(answers)}, {json.dumps([end - _SHOWN_S, end])})")
        assert drawn.keys() == answers.keys()
        assert {title for title, lines in drawn.items() if not lines} == {"Failures by cause"}
        assert page.complaints == []
        height = page.run("document.documentElement.scrollHeight")
        page.call("Emulation.setDeviceMetricsOverride", width=1336, height=height, deviceScaleFactor=1, mobile=False)
        page.picture((Path(PICTURES) if PICTURES else tmp_path) / "board.png")


def test_a_deployment_without_decode_instances_is_reported(watched: Watched) -> None:
    """The last test: it takes the deployment apart."""
    watched.stand.kill("decode")
    wait_until(lambda: watched.prometheus.rules()["KVBatonNoPair"]["state"] != "inactive", "the alert is pending", _WAIT_S)
