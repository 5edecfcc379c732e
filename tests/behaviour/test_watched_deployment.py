"""A real deployment as its operators see it: `kvbaton doctor --request`, and what board and alert rules make of its metrics."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from system import Client, Stand

from kvbaton.cli.main import main
from kvbaton.launch.ports import PortPicker
from promql import Scrapes, evaluate
from vllm_series import vllm_pages

_DEPLOY = Path(__file__).parents[2] / "deploy"
_BOARD = json.loads((_DEPLOY / "grafana" / "kvbaton.json").read_text())
_RULES = [
    rule for group in yaml.safe_load((_DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
_ALERTS = {rule["alert"]: rule["expr"] for rule in _RULES}
_PANELS = [panel for panel in _BOARD["panels"] if panel["type"] != "row"]
_VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*"}
_IDLE_PANELS = {"Failures by cause", "Must stay 0"}
"""Of what has not happened here; the others show something."""


class Deployment:
    """A router, a prefill and a decode instance."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self._scrapes = 0
        self.prefill = f"http://127.0.0.1:{stand.start('prefill', 'prefill')}"
        self.decode = f"http://127.0.0.1:{stand.start('decode', 'decode')}"
        stand.wait_for("live", 2)
        self.router = f"http://127.0.0.1:{stand.router_port}"

    def scrape(self) -> dict[str, str]:
        """The metrics of every process, and those of a vLLM."""
        addresses = (self.router, self.prefill, self.decode)
        pages = {each: Client(int(each.rpartition(":")[2])).get("/metrics").content.decode() for each in addresses}
        self._scrapes += 1
        return {**pages, "vllm": vllm_pages(self._scrapes + 1)[-1]}


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Stand(router_arguments=("--local-prefill-chars", "16")) as stand:
        yield Deployment(stand)


def filled(expression: str) -> str:
    """An expression of the board as Grafana sends it."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


class Doctor:
    """Runs the command: its exit code, what it printed as JSON, and its errors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        self._monkeypatch.setattr(sys, "argv", ["kvbaton", "doctor", *arguments, "--json"])
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        shown = self._capsys.readouterr()
        return caught.value.code, json.loads(shown.out) if shown.out else {}, shown.err


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(monkeypatch, capsys)


def test_a_router_with_a_pair_hands_over(deployment: Deployment, doctor: Doctor) -> None:
    code, found, errors = doctor("--request", deployment.router, "--metrics", deployment.decode)
    assert (code, found["ok"], found["verdict"]) == (0, True, "handed over"), (found, errors)
    places = " ".join(row["place"] for row in found["evidence"])
    for place in ("the record in the answer", "the timeline of tx-", "the metrics at"):
        assert place in places
    assert {row["verdict"] for row in found["evidence"]} == {"handed over"}


def test_the_control_a_decode_instance_that_is_asked_directly_computes_the_prompt(
    deployment: Deployment, doctor: Doctor
) -> None:
    code, found, errors = doctor("--request", deployment.decode, "--metrics", deployment.decode)
    assert (code, found["ok"], found["verdict"]) == (1, False, "not handed over"), (found, errors)
    assert "no series of delivered hand-offs grew" in json.dumps(found["evidence"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--request", "ftp://x"), "--request is 'ftp://x'"),
        (("--request", "127.0.0.1:{free}"), "is the deployment running?"),
        (("--metrics", "http://127.0.0.1:1"), "--metrics and --model belong to --request"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(doctor: Doctor, arguments: tuple[str, ...], expected: str) -> None:
    free = str(PortPicker().pick())
    code, found, errors = doctor(*(each.replace("{free}", free) for each in arguments))
    assert (code, found) == (2, {})
    assert expected in " ".join(errors.split())
    assert "Traceback" not in errors


def test_the_board_is_one_that_grafana_loads() -> None:
    assert _BOARD["uid"] == "kvbaton"
    assert "id" not in _BOARD, "an id of another Grafana"
    ids = [panel["id"] for panel in _BOARD["panels"]]
    assert len(ids) == len(set(ids))
    assert {variable["name"] for variable in _BOARD["templating"]["list"]} == {"datasource", "job", "instance"}
    for panel in _PANELS:
        assert {"x", "y", "w", "h"} == panel["gridPos"].keys()
        assert [target["refId"] for target in panel["targets"]] == [chr(65 + i) for i in range(len(panel["targets"]))]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


@pytest.fixture(scope="module")
def healthy(deployment: Deployment) -> Scrapes:
    """The metrics before and after a few requests."""
    before = deployment.scrape()
    for index in range(4):
        assert deployment.stand.client.complete(f"{index} a prompt that is long enough to be handed over").status == 200
    assert deployment.stand.client.complete("short").status == 200
    return before, deployment.scrape()


@pytest.mark.parametrize("panel", _PANELS, ids=[panel["title"] for panel in _PANELS])
def test_every_query_of_the_board_shows_real_metrics(healthy: Scrapes, panel: dict[str, Any]) -> None:
    pytest.importorskip("promql_parser")
    shown = [evaluate(filled(target["expr"]), healthy) for target in panel["targets"]]
    if panel["title"] not in _IDLE_PANELS:
        assert all(shown), [target["expr"] for target, found in zip(panel["targets"], shown, strict=True) if not found]


@pytest.mark.parametrize("alert", _ALERTS)
def test_no_alert_fires_where_all_is_well(healthy: Scrapes, alert: str) -> None:
    pytest.importorskip("promql_parser")
    assert evaluate(_ALERTS[alert], healthy) == {}


_BAD_PAGE = """
kvbaton_router_refused_instances 1
kvbaton_router_instance_deaths_total 1
kvbaton_router_queue_refusals_total 1
kvbaton_router_queue_timeouts_total 0
kvbaton_router_local_prefills_total 9
kvbaton_router_requests_total{path="/v1/completions",status="2xx"} 10
vllm:kvbaton_handoffs_total{engine="0",outcome="failed",side="target"} 2
vllm:kvbaton_handoffs_total{engine="0",outcome="delivered",side="target"} 20
kvbaton_handoffs_total{outcome="expired",side="source"} 1
kvbaton_quarantined_blocks 3
vllm:kvbaton_checksum_mismatches_total{engine="0"} 1
kvbaton_agent_errors_total 1
kvbaton_router_failed_certificate_loads_total 1
kvbaton_failed_cluster_key_loads_total 1
kvbaton_router_instances{mode="push",type="prefill"} 0
kvbaton_router_instances{mode="push",type="decode"} 1
"""


@pytest.mark.parametrize("alert", _ALERTS)
def test_every_alert_fires_where_it_should(alert: str) -> None:
    pytest.importorskip("promql_parser")
    fired = evaluate(_ALERTS[alert], ({}, {"bad": _BAD_PAGE}))
    assert [dict(labels)["instance"] for labels in fired] == ["bad"]


def test_a_router_that_lost_its_decode_instance_fires(deployment: Deployment) -> None:
    """The last test: it takes the deployment apart."""
    pytest.importorskip("promql_parser")
    before = deployment.scrape()
    deployment.stand.kill("decode")
    deployment.stand.wait_for("live", 1)
    page = {"router": deployment.stand.client.get("/metrics").content.decode()}
    assert evaluate(_ALERTS["KVBatonNoPair"], (before, page))
