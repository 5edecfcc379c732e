"""The parts of a local set-up: what is started, where, and that no port is used twice."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

from kvbaton.config import HandoffSettings, OnFailure
from kvbaton.core.handoff import AuxChannel, Integrity, Mode
from kvbaton.engines.base import Controls, EngineOptions, pair_parts
from kvbaton.engines.embedded.plugin import EmbeddedServers
from kvbaton.launch.local import kvbaton_command, router_part
from kvbaton.launch.ports import PortPicker

HANDOFF = HandoffSettings(Mode.PULL, Integrity.FULL, AuxChannel.DATA, OnFailure.RECOMPUTE)
OPTIONS = EngineOptions("tiny", "tcp", 5, HANDOFF, controls=Controls(poison=True))
SERVERS = EmbeddedServers(OPTIONS)


def _value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_commands_run_this_interpreter() -> None:
    assert kvbaton_command("up", "--port", "1") == [sys.executable, "-m", "kvbaton.cli.main", "up", "--port", "1"]


def test_a_router_is_healthy_where_it_listens() -> None:
    part = router_part("127.0.0.1", 11000, 11001)
    assert part.health_url == "http://127.0.0.1:11000/health"
    assert _value(list(part.command), "--discovery-port") == "11001"
    assert router_part("::1", 11000, 11001).health_url == "http://[::1]:11000/health"


def test_an_instance_gets_its_role_options_and_routers() -> None:
    part = SERVERS.part("d", "decode", PortPicker(), ["127.0.0.1:1", "127.0.0.1:2"])
    command = list(part.command)
    assert part.health_url == f"{part.base_url}/health"
    assert part.base_url.endswith(":" + _value(command, "--port"))
    assert (_value(command, "--role"), _value(command, "--model"), _value(command, "--transport")) == ("decode", "tiny", "tcp")
    assert (_value(command, "--mode"), _value(command, "--integrity")) == ("pull", "full")
    assert (_value(command, "--aux-channel"), _value(command, "--on-failure")) == ("data", "recompute")
    assert command.count("--router") == 2
    assert command[-1] == "--poison"
    assert part.environment


def test_a_switch_of_the_handoff_is_given_without_a_value() -> None:
    part = SERVERS.part("d", "decode", PortPicker())
    assert "--unfenced-writes" not in part.command
    writing = replace(OPTIONS, transport="nixl", handoff=HandoffSettings(unfenced_writes=True))
    command = list(EmbeddedServers(writing).part("d", "decode", PortPicker()).command)
    assert command[command.index("--unfenced-writes") + 1].startswith("--")


def test_a_pair_is_as_large_as_asked_for_and_shares_no_port() -> None:
    parts = pair_parts(SERVERS, SERVERS, (2, 3), PortPicker(), 12000)
    assert [part.name for part in parts] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    used = Counter(_value(list(part.command), option) for part in parts for option in ("--port", "--control-port"))
    assert set(used.values()) == {1}
    assert all(_value(list(part.command), "--router") == "127.0.0.1:12000" for part in parts)
