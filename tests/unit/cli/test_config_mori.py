"""`kvbaton config mori`: the lines have what the servers have that a verification starts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from kvbaton.cli.main import make_app
from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Mode
from kvbaton.discovery.messages import Registration, read_registration
from kvbaton.engines.base import Controls, EngineOptions
from kvbaton.engines.sglang.setup.environment import SglangEnvironment
from kvbaton.engines.sglang.setup.servers import SglangServers
from kvbaton.engines.vllm.setup.environment import VllmEnvironment
from kvbaton.engines.vllm.setup.servers import VllmServers
from kvbaton.errors import ConfigError
from kvbaton.launch.ports import PortPicker

_ROUTER = "127.0.0.1:8001"


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    make_app()(["config", "mori", "--model", "/m", *arguments], result_action="return_value")
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("mode", list(Mode))
def test_lines_of_vllm(capsys: pytest.CaptureFixture[str], mode: Mode) -> None:
    options = EngineOptions("m", connector="moriio", handoff=HandoffSettings(mode=mode))
    servers = VllmServers(VllmEnvironment(Path("/nowhere")), Path("/m"), options)
    for words, role in zip(lines(capsys, "--mode", mode), ("prefill", "decode"), strict=False):
        assert words[:5] == ["KVBATON_MORI=auto", "THP_MEM_ALLOC_ENABLE=1", "vllm", "serve", "/m"]
        part = servers.part(role, role, PortPicker(), [_ROUTER])
        assert part.environment["KVBATON_MORI"] == "local"
        assert part.environment["THP_MEM_ALLOC_ENABLE"] == "1", "vLLM's connector needs a cache that begins on a page"
        printed = json.loads(words[words.index("--kv-transfer-config") + 1])
        started = json.loads(part.command[part.command.index("--kv-transfer-config") + 1])
        extra, same = (each.pop("kv_connector_extra_config") for each in (printed, started))
        assert printed == started
        assert extra.keys() == same.keys()
        assert (extra["read_mode"], extra["proxy_ip"], extra["proxy_ping_port"]) == (mode is Mode.PULL, "127.0.0.1", 8001)
        assert len({extra["http_port"], extra["handshake_port"], extra["notify_port"]}) == 3
        assert words[words.index("--port") + 1] == str(extra["http_port"])


def test_lines_of_sglang(capsys: pytest.CaptureFixture[str]) -> None:
    servers = SglangServers(SglangEnvironment(Path("/nowhere")), Path("/m"), EngineOptions("m", connector="mori"))
    for words, role in zip(lines(capsys, "--paths", "tcp")[2:], ("prefill", "decode"), strict=True):
        assert words[:4] == ["KVBATON_MORI=tcp", "python", "-m", "sglang.launch_server"]
        command = list(servers.part(role, role, PortPicker()).command)
        for at, word in enumerate(words[4:], 4):
            if word.startswith("--"):
                assert word in command
                if "port" not in word and words[-1] != word:
                    assert command[command.index(word) + 1] == words[at + 1]


def test_the_router_must_be_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--router is 'x'"):
        lines(capsys, "--router", "x")


def test_a_list_of_instances_has_the_servers_of_sglang() -> None:
    """Its own backends register with no router."""
    controls = Controls(drop_writes=True)
    options = EngineOptions("m", "tcp", connector="mori", controls=controls, counts_directory="/counts")
    servers = SglangServers(SglangEnvironment(Path("/nowhere")), Path("/m"), options)
    for role in ("prefill", "decode"):
        part = servers.part(role, role, PortPicker())
        registration = read_registration(dict(part.listed))
        assert isinstance(registration, Registration), registration
        assert (registration.type.word, f"http://{registration.http_address}") == (role, part.base_url)
        switches = {name: value for name, value in part.environment.items() if name.startswith("KVBATON_MORI")}
        assert switches == {
            "KVBATON_MORI": "tcp",
            "KVBATON_MORI_DROP_WRITES": "gpu",
            "KVBATON_MORI_COUNTS": "/counts",
        }
