"""`kvbaton config`: a line that can be pasted, or one clear sentence."""

from __future__ import annotations

import json
import shlex

import pytest

from kvbaton.cli.main import make_app
from kvbaton.engines.vllm.settings import parse_settings
from kvbaton.errors import ConfigError


def line(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    make_app()(["config", "vllm", *arguments], result_action="return_value")
    return shlex.split(capsys.readouterr().out)


def test_a_launch_line_for_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--role", "decode", "--model", "m", "--router", "10.0.0.1:8002", "--host", "0.0.0.0", "--retry", "2"]  # noqa: S104
    options += ["--advertise-host", "10.0.0.5", "--mode", "pull", "--on-failure", "recompute"]
    words = line(capsys, *options, "--cluster-key-file", "/there/key")
    assert words[:3] == ["vllm", "serve", "m"]
    config = json.loads(words[-1])
    assert (config["kv_role"], config["kv_load_failure_policy"]) == ("kv_consumer", "recompute")
    settings = parse_settings(config["kv_connector_extra_config"])
    assert (settings.http_address, settings.control_address.host) == ("10.0.0.5:8100", "10.0.0.5")
    assert settings.limits.retry == 2
    assert settings.handoffs_address == "10.0.0.5:8102"
    assert "transfer_timeout" not in config["kv_connector_extra_config"], "defaults are left out"


def test_what_cannot_work_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="advertise_host"):
        line(capsys, "--role", "prefill", "--model", "m", "--host", "0.0.0.0")  # noqa: S104
    with pytest.raises(ConfigError, match="--port is 0"):
        line(capsys, "--role", "prefill", "--model", "m", "--port", "0")


def test_what_the_connector_would_not_obey_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--router with --role both"):
        line(capsys, "--role", "both", "--model", "m", "--router", "127.0.0.1:8001")
    with pytest.raises(ConfigError, match="--aux-channel is data"):
        line(capsys, "--role", "prefill", "--model", "m", "--aux-channel", "data")


WOULD_NOT_START = {
    "router": (["--router", "x"], "routers has 'x'"),
    "host": (["--host", "a b"], "control_host is 'a b'"),
    "advertised": (["--advertise-host", "!!"], "advertise_host is '!!'"),
    "allowed": (["--allow", "???"], "allow is '\\?\\?\\?'"),
    "the same port": (["--handoffs-port", "8101"], "handoffs_port is 8101"),
    "the control port": (["--port", "8101"], "--port and --control-port are both 8101"),
    "the hand-offs port": (["--port", "8102"], "--port and --handoffs-port are both 8102"),
    "heard by everybody": (["--host", "0.0.0.0", "--advertise-host", "10.0.0.5"], "without a cluster key"),  # noqa: S104
}


@pytest.mark.parametrize("name", WOULD_NOT_START)
def test_what_would_not_start_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("KVBATON_CLUSTER_KEY", raising=False)
    options, words = WOULD_NOT_START[name]
    with pytest.raises(ConfigError, match=words):
        line(capsys, "--role", "prefill", "--model", "m", *options)


def test_a_key_in_the_environment_lets_it_listen_everywhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBATON_CLUSTER_KEY", "k" * 32)
    everywhere = ["--host", "0.0.0.0", "--advertise-host", "10.0.0.5"]  # noqa: S104
    assert line(capsys, "--role", "prefill", "--model", "m", *everywhere)
