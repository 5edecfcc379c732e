"""The connector by its name alone: vLLM's entry point, and the alias for launchers that know only `NixlConnector`."""

from __future__ import annotations

import importlib
import logging
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from kvbaton.core.addresses import ControlAddress
from kvbaton.core.handoff import Incarnation, Mode
from kvbaton.engines.handoff_params import (
    HandoffInfo,
    KVTransferParams,
    SourceParams,
    TargetParams,
    answer_params,
    read_params,
)
from kvbaton.engines.vllm import register
from kvbaton.engines.vllm.nixl_settings import HOST_VARIABLE, PORT_VARIABLE, parse_nixl_settings
from kvbaton.engines.vllm.setup import environment
from kvbaton.errors import ConfigError

_PROJECT = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
_PLUGINS = _PROJECT["project"]["entry-points"]["vllm.general_plugins"]
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


class Factory:
    """As vLLM's: a name is taken once."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[str, str]] = {}

    def register_connector(self, name: str, module_path: str, class_name: str) -> None:
        if name in self.known:
            raise ValueError(f"Connector '{name}' is already registered.")
        self.known[name] = (module_path, class_name)


def test_every_entry_point_leads_to_a_function() -> None:
    assert _PLUGINS["kvbaton"] == "kvbaton.engines.vllm:register"
    for value in _PLUGINS.values():
        module, _, name = value.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_servers_that_kvbaton_starts_have_the_entry_points_of_the_package(tmp_path: Path) -> None:
    directory = environment.VllmEnvironment.named(tmp_path, "vllm-9").directory
    directory.mkdir()
    (directory / "installed").touch()
    (points,) = environment.ensure_environment(tmp_path, print, "9").kvbaton_path.glob("*.dist-info/entry_points.txt")
    lines = points.read_text().splitlines()
    assert lines == ["[vllm.general_plugins]", *(f"{name} = {value}" for name, value in sorted(_PLUGINS.items()))]


def test_the_name_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = Factory()
    module: Any = ModuleType(_FACTORY)
    module.KVConnectorFactory = factory
    monkeypatch.setitem(sys.modules, _FACTORY, module)
    register()
    register()
    assert factory.known == {"KVBatonConnector": ("kvbaton.engines.vllm.connector", "KVBatonConnector")}


def test_a_vllm_without_the_factory_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, _FACTORY, None)
    monkeypatch.setattr(logging.getLogger("kvbaton"), "propagate", True)
    register()
    assert "KVBatonConnector is not known to vLLM by its name" in caplog.text


def test_the_alias_takes_the_address_of_nixl() -> None:
    settings = parse_nixl_settings({}, {HOST_VARIABLE: "10.0.0.5", PORT_VARIABLE: "5557"})
    assert (settings.control_host, settings.control_port) == ("10.0.0.5", 5557)
    assert (settings.mode, settings.transport) == (Mode.PULL, "tcp")


def test_the_alias_has_the_defaults_of_nixl_and_keys_of_kvbaton_win() -> None:
    settings = parse_nixl_settings({}, {})
    assert (settings.control_host, settings.control_port) == ("127.0.0.1", 5600)
    own = {"control_port": 7000, "control_host": "10.0.0.7", "mode": "push", "transport": "local"}
    settings = parse_nixl_settings(own, {HOST_VARIABLE: "10.0.0.5", PORT_VARIABLE: "x"})
    assert (settings.control_host, settings.control_port, settings.mode, settings.transport) == (
        "10.0.0.7",
        7000,
        Mode.PUSH,
        "local",
    )


def test_tuning_of_nixl_is_named_and_has_no_effect(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logging.getLogger("kvbaton"), "propagate", True)
    given = {"backends": ["UCX", "GDS"], "num_threads": 8, "kv_lease_duration": 30, "bidirectional_kv_xfer": False}
    settings = parse_nixl_settings(given, {})
    assert settings.defer_timeout == 60
    for key in given:
        assert key in caplog.text


@pytest.mark.parametrize(
    ("extra", "variables", "expected"),
    [
        ({"bidirectional_kv_xfer": True}, {}, "unknown key 'bidirectional_kv_xfer'; caches go from prefill to decode"),
        ({"contrl_port": 1}, {}, "did you mean 'control_port'"),
        ({}, {PORT_VARIABLE: "70000"}, f"{PORT_VARIABLE} is '70000'"),
        ({}, {PORT_VARIABLE: "5600; rm"}, f"{PORT_VARIABLE} is '5600; rm'"),
        ({}, {HOST_VARIABLE: "0.0.0.0"}, "which no peer can dial"),  # noqa: S104
        ({}, {HOST_VARIABLE: "a b"}, "control_host is 'a b'"),
    ],
)
def test_what_the_alias_cannot_do_is_refused_by_name(extra: dict[str, Any], variables: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_nixl_settings(extra, variables)


def test_nulls_in_and_the_prefill_answer_echoed_to_decode() -> None:
    """What llm-d's proxy sends for `nixlv2`, byte for byte JSON; it adds an X-Request-Id without addresses to both."""
    asked = (
        b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
        b'"remote_host":null,"remote_port":null}'
    )
    request_id = "0b9c9a3e-c2f4-11f0-8de9-0242ac120002"
    source = read_params(msgspec.json.decode(asked, type=KVTransferParams), request_id)
    assert isinstance(source, SourceParams)
    info = HandoffInfo(ControlAddress.of("10.0.0.5", 5600), Incarnation("inc-1"))
    echoed = msgspec.json.encode(answer_params(source, info))
    target = read_params(msgspec.json.decode(echoed, type=KVTransferParams), request_id)
    assert isinstance(target, TargetParams)
    assert (target.transfer_id, target.source, target.source_incarnation) == (
        source.transfer_id,
        info.control_address,
        info.incarnation,
    )
