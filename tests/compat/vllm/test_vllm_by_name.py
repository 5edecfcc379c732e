"""The connector by its name alone, and as `NixlConnector`, in real vLLM: with the requests of llm-d's `nixlv2` proxy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from vllm_servers import MODEL, ready

from kvbaton.cli.main import main
from kvbaton.engines.vllm.nixl_settings import HOST_VARIABLE, PORT_VARIABLE
from kvbaton.engines.vllm.setup.servers import VllmServers
from kvbaton.launch.fleet import Fleet
from kvbaton.launch.ports import PortPicker

pytestmark = pytest.mark.timeout(1800)

_START_S = 900.0
_ANSWER_S = 300.0
_ALIAS = {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvbaton.engines.vllm.nixl_alias", "kv_role": "kv_both"}
_NULLS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.mark.vllm_full
def test_the_name_alone_is_enough_and_the_alias_is_ours() -> None:
    environment = ready().environment
    script = Path(__file__).parent / "inside" / "by_name.py"
    variables = {**os.environ, **environment.variables(), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [str(environment.python), str(script)]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = dict(line.split(": ", 1) for line in run.stdout.splitlines() if ": " in line)
    assert found["before"] == "Unsupported connector type: KVBatonConnector"
    assert found["after"] == "kvbaton.engines.vllm.connector.KVBatonConnector hma=True"
    assert found["alias"] == "kvbaton.engines.vllm.nixl_alias.NixlConnector hma=True"
    assert found["statistics"] == "kvbaton.engines.vllm.nixl_alias"
    assert found["is nixl"] == "True"


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


class Proxy:
    """Does what llm-d's proxy does for `nixlv2`; without `is_echoing`, it forgets to pass the prefill answer on."""

    def __init__(self, prefill: str, decode: str) -> None:
        self.is_echoing = True
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send({"data": [{"id": MODEL}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                first = post(prefill, body | {"max_tokens": 1, "stream": False, "kv_transfer_params": _NULLS})
                echoed = {"kv_transfer_params": first["kv_transfer_params"]} if proxy.is_echoing else {}
                self._send(post(decode, body | echoed))

            def log_message(self, *_: object) -> None:
                """Print nothing."""

            def _send(self, document: dict[str, Any]) -> None:
                content = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", PortPicker().pick()), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join(10)


@contextmanager
def started(prepared: VllmServers, *configs: dict[str, Any]) -> Iterator[list[str]]:
    """Servers with these `--kv-transfer-config`s and NIXL's variables, and the base URL of each."""
    ports, urls = PortPicker(), []
    with Fleet() as fleet:
        for index, config in enumerate(configs):
            part = prepared.plain_part(f"server-{index}", ports.pick(), config)
            side_channel = {HOST_VARIABLE: "localhost", PORT_VARIABLE: str(ports.pick())}
            fleet.start(replace(part, environment=part.environment | side_channel))
            urls.append(part.base_url)
        fleet.wait_healthy(_START_S)
        yield urls


def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["kvbaton", "doctor", *arguments, "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code, json.loads(capsys.readouterr().out)


@pytest.mark.vllm_full
def test_a_pair_that_is_called_nixl_hands_over(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = ready()
    prepared = replace(prepared, options=replace(prepared.options, sharing=2))
    tuned = _ALIAS | {"kv_connector_extra_config": {"backends": ["UCX"], "num_threads": 2}}
    with started(prepared, tuned, _ALIAS) as (prefill, decode):
        proxy = Proxy(prefill, decode)
        try:
            body = {"model": MODEL, "prompt": "The quick brown fox " * 20, "max_tokens": 12, "temperature": 0}
            alone, handed = post(prefill, body), post(proxy.url, body)
            record = handed["kv_transfer_params"]["kvbaton"]
            assert handed["choices"][0]["text"] == alone["choices"][0]["text"]
            assert (record["handed_off"], record["transport"], record["recomputed"]) == (True, "tcp", False)
            assert record["bytes_moved"] == record["bytes_planned"] > 0
            code, found = doctor(monkeypatch, capsys, "--request", proxy.url, "--metrics", decode)
            assert (code, found["verdict"]) == (0, "handed over"), found
            proxy.is_echoing = False
            code, found = doctor(monkeypatch, capsys, "--request", proxy.url, "--metrics", decode)
            assert (code, found["verdict"]) == (1, "not handed over"), found
        finally:
            proxy.close()


@pytest.mark.vllm_full
def test_a_vllm_without_a_connector_is_found_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = ready()
    part = prepared.plain_part("single", PortPicker().pick(), None)
    with Fleet() as fleet:
        fleet.start(part)
        fleet.wait_healthy(_START_S)
        code, found = doctor(monkeypatch, capsys, "--request", part.base_url, "--metrics", part.base_url)
    assert (code, found["verdict"]) == (1, "not handed over"), found
    assert "no series of a connector" in json.dumps(found["evidence"])
