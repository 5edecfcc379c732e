"""The variable that configures the backend: every mistake is named by its key."""

from __future__ import annotations

import pytest

from kvbaton.core.handoff import Mode
from kvbaton.engines.sglang.settings import CONFIG_VARIABLE, parse_settings
from kvbaton.errors import ConfigError


def test_without_the_variable_defaults_hold() -> None:
    settings = parse_settings("")
    assert (settings.mode, settings.transport, settings.routers) == (Mode.PUSH, "local", ())


def test_what_is_given_reaches_the_agents() -> None:
    settings = parse_settings('{"mode": "pull", "limits": {"transfer_timeout": 7}, "advertise_host": "10.0.0.1"}')
    agents = settings.agents("127.0.0.1", 7001)
    assert (agents.limits.transfer_timeout, str(agents.control_address.host), agents.handoff.mode) == (7.0, "10.0.0.1", "pull")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nonsense", "no JSON object"),
        ("[]", "no JSON object"),
        ('{"mod": "push"}', "did you mean 'mode'"),
        ('{"transfer_timeout": 3}', "inside limits"),
        ('{"limits": {"transfer_timout": 3}}', "did you mean 'transfer_timeout'"),
        ('{"control_host": "x"}', "--host"),
        ('{"mode": "shove"}', "$.mode"),
        ('{"routers": ["nowhere"]}', "routers has 'nowhere'"),
        ('{"heartbeat_s": 0}', "heartbeat_s is 0"),
        ('{"handoffs_port": 70000}', "handoffs_port is 70000"),
        ('{"advertise_host": "0.0.0.0"}', "advertise_host is '0.0.0.0'"),
        ('{"unfenced_writes": true, "transport": "tcp"}', "unfenced"),
    ],
)
def test_a_mistake_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_settings(text)
    assert CONFIG_VARIABLE in str(raised.value)
    assert named in str(raised.value)


def test_in_pull_no_source_writes() -> None:
    text = '{"transport": "nixl", "unfenced_writes": true, "mode": "%s"}'
    assert parse_settings(text % "push").handoff.unfenced_writes
    assert not parse_settings(text % "pull").handoff.unfenced_writes
