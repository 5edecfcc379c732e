"""`kv_connector_extra_config`: what is taken, and that every mistake is named by its key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kvbaton.config import Limits
from kvbaton.core.auth import keys_of
from kvbaton.core.handoff import Integrity, Mode
from kvbaton.engines.vllm.settings import ConnectorSettings, parse_settings
from kvbaton.errors import ConfigError


def test_a_port_is_enough() -> None:
    settings = parse_settings({"control_port": 7000})
    assert settings.limits == Limits()
    assert (settings.mode, settings.transport, settings.routers) == (Mode.PUSH, "local", ())


def test_everything_is_read() -> None:
    settings = parse_settings(
        {
            "control_port": 7000,
            "mode": "pull",
            "integrity": "full",
            "routers": ["127.0.0.1:1"],
            "http_address": "127.0.0.1:2",
            "retry": 2,
            "busy_poll_s": 0,
        }
    )
    assert (settings.handoff.mode, settings.handoff.integrity) == (Mode.PULL, Integrity.FULL)
    assert settings.limits.retry == 2
    assert settings.handoff.busy_poll_s == 0


def test_writes_are_chosen_by_name() -> None:
    settings = parse_settings({"control_port": 7000, "transport": "nixl", "unfenced_writes": True})
    assert settings.handoff.unfenced_writes
    assert not parse_settings({"control_port": 7000, "transport": "nixl"}).handoff.unfenced_writes


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "control_port is missing"),
    "unknown": ({"control_prot": 1}, "unknown key 'control_prot'; did you mean 'control_port'"),
    "far off": ({"zzz": 1}, "known are advertise_host"),
    "of another connector": ({"handshake_port": 1}, "give control_port"),
    "of nixl": ({"kv_lease_duration": 30}, "give defer_timeout"),
    "of vllm": ({"on_failure": "fail"}, "kv_load_failure_policy"),
    "secret": ({"cluster_key": "x"}, "cluster_key_file"),
    "port": ({"control_port": 65536}, "control_port is 65536"),
    "no port": ({"control_port": 1, "handoffs_port": -1}, "handoffs_port is -1"),
    "the same port": ({"control_port": 7000, "handoffs_port": 7000}, "not the control_port"),
    "text": ({"control_port": "7000"}, r"\$\.control_port"),
    "mode": ({"control_port": 1, "mode": "READ"}, "mode is 'READ'; known are push, pull"),
    "no mode": ({"control_port": 1, "mode": ["push"]}, "mode is .'push'.; known are push, pull"),
    "integrity": ({"control_port": 1, "integrity": True}, "integrity is True; known are off, sampled, full"),
    "transport": ({"control_port": 1, "transport": "pigeon"}, "known are auto, cuda, local, mooncake, mori, nixl, tcp"),
    "reads only": ({"control_port": 1, "unfenced_writes": True}, "extra_config: unfenced_writes is on, and transport local"),
    "order": ({"control_port": 1, "transfer_timeout": 60}, "defer_timeout .60 s. must be longer"),
    "negative": ({"control_port": 1, "retry": -1}, "retry is -1"),
    "zero": ({"control_port": 1, "stop_timeout": 0}, "stop_timeout is 0"),
    "nan": ({"control_port": 1, "transfer_timeout": math.nan}, "transfer_timeout is nan"),
    "infinite": ({"control_port": 1, "defer_timeout": math.inf}, "defer_timeout is inf"),
    "word": ({"control_port": 1, "retry": "soon"}, r"\$\.retry"),
    "unreachable": ({"control_port": 1, "routers": ["127.0.0.1:9"]}, "no http_address"),
    "busy below 0": ({"control_port": 1, "busy_poll_s": -0.001}, "extra_config: busy_poll_s is -0.001"),
    "busy for long": ({"control_port": 1, "busy_poll_s": 1}, "extra_config: busy_poll_s is 1"),
    "busy nan": ({"control_port": 1, "busy_poll_s": math.nan}, "extra_config: busy_poll_s is nan"),
    "heartbeat below 0": ({"control_port": 1, "heartbeat_s": -1}, "heartbeat_s is -1"),
    "heartbeat 0": ({"control_port": 1, "heartbeat_s": 0}, "heartbeat_s is 0"),
    "heartbeat nan": ({"control_port": 1, "heartbeat_s": math.nan}, "heartbeat_s is nan"),
    "heartbeat infinite": ({"control_port": 1, "heartbeat_s": math.inf}, "heartbeat_s is inf"),
    "heartbeat too rare": ({"control_port": 1, "heartbeat_s": 3.5}, "heartbeat_s is 3.5"),
    "api": ({"control_port": 1, "http_address": "nonsense"}, "http_address is 'nonsense', which is not host:port"),
    "api with a scheme": ({"control_port": 1, "http_address": "https://h:1"}, "http_address is .* has a scheme"),
    "api everywhere": ({"control_port": 1, "http_address": "0.0.0.0:1"}, "http_address is .*, which no router can dial"),
    "router": ({"control_port": 1, "http_address": "h:1", "routers": ["x"]}, "routers has 'x', which is not host:port"),
    "control host": ({"control_port": 1, "control_host": "a b"}, "control_host is 'a b'"),
    "bracketed host": ({"control_port": 1, "control_host": "[::1]"}, "control_host is .* without brackets"),
    "advertised host": ({"control_port": 1, "advertise_host": "!!"}, "advertise_host is '!!'"),
    "advertised everywhere": ({"control_port": 1, "advertise_host": "0.0.0.0"}, "advertise_host is '0.0.0.0'"),  # noqa: S104
    "peers": ({"control_port": 1, "allow": ["???"]}, "extra_config: allow is "),
    "peers of half a network": ({"control_port": 1, "allow": ["10.0.0.1/8"]}, "extra_config: allow is "),
    "of nixl's threads": ({"num_threads": 4}, "as many threads as it needs"),
    "of nixl's engines": ({"engine_ttl": 60}, "incarnation"),
    "of nixl's way back": ({"bidirectional_kv_xfer": True}, "from prefill to decode"),
    "of mori": ({"qp_per_transfer": 2}, "leave it out"),
    "of mori's batches": ({"post_batch_size": 2}, "leave it out"),
    "of mori's workers": ({"num_workers": 2}, "leave it out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named_by_their_key(name: str) -> None:
    extra, words = WRONG[name]
    with pytest.raises(ConfigError, match=words) as caught:
        parse_settings(extra)
    assert "kv_connector_extra_config" in str(caught.value)


def test_the_limits_are_those_of_every_instance() -> None:
    assert set(Limits.__dataclass_fields__) <= set(ConnectorSettings.__struct_fields__)


def test_the_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("k" * 32)
    path.chmod(0o600)
    key = parse_settings({"control_port": 1, "cluster_key_file": str(path)}).trust({}).key
    assert key is not None
    assert keys_of(key) == (b"k" * 32,)
    assert parse_settings({"control_port": 1}).trust({"KVBATON_CLUSTER_KEY": "e" * 32}).key == b"e" * 32


def test_names_are_looked_up_where_the_instance_runs() -> None:
    """What is printed here may be for another machine, with other names and files."""
    extra = {"control_port": 1, "control_host": "some.where", "allow": ["no.such.host.invalid"], "cluster_key_file": "/no/key"}
    settings = parse_settings(extra)
    with pytest.raises(ConfigError, match="kv_connector_extra_config: cluster_key_file '/no/key'"):
        settings.trust({})


def test_what_is_right_is_taken() -> None:
    for host in ("10.0.0.5", "::1", "host.example"):
        assert parse_settings({"control_port": 1, "control_host": host}).control_address.host == host
    assert parse_settings({"control_port": 1, "control_host": "0.0.0.0", "advertise_host": "h"}).control_address.host == "h"  # noqa: S104
    assert parse_settings({"control_port": 1, "heartbeat_s": 3, "allow": ["10.0.0.0/8", "::1", "host"]}).heartbeat_s == 3


def test_each_data_parallel_rank_has_ports_of_its_own() -> None:
    settings = parse_settings({"control_port": 7000, "handoffs_port": 7100, "dp_size": 4})
    ports = [(each.control_port, each.handoffs_port) for each in map(settings.of_dp_rank, range(4))]
    assert ports == [(7000, 7100), (7001, 7101), (7002, 7102), (7003, 7103)]
    with pytest.raises(ConfigError, match="dp_size is 4, and this is data-parallel rank 4"):
        settings.of_dp_rank(4)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"dp_size": 0}, "dp_size is 0"),
        ({"dp_size": 2, "handoffs_port": 7001}, "are too near"),
        ({"draft": "drop"}, "draft is 'drop'; known are refuse, target computes"),
        ({"drop": "head"}, "drop is 'head'; known are .*heads"),
    ],
)
def test_wrong_shapes_and_controls_are_named(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_settings({"control_port": 7000, **extra})
