"""Trust: which hosts are dialled, whose frames are read, where to listen; and bad settings, refused without showing the key."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvbaton.config import CLUSTER_KEY_VARIABLE, KeyFile, Trust, parse_trust
from kvbaton.errors import ConfigError

KEY = "a key of thirty-two characters.."
LOOPBACK = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost", "LocalHost"]
ELSEWHERE = ["10.0.0.1", "0.0.0.0", "::", "*", "::ffff:10.0.0.1", "example.com", "localhost.example.com", "2130706433", "127.1"]  # noqa: S104
ADDRESSES = {"node-7": {"10.7.0.7", "fe80::7%eth0"}}


def resolve(name: str) -> Iterable[str]:
    if name not in ADDRESSES:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return ADDRESSES[name]


def allowing(*entries: str, key: str | None = None) -> Trust:
    environment = {} if key is None else {CLUSTER_KEY_VARIABLE: key}
    return parse_trust(None, environment, entries, resolve=resolve)


def may_dial(trust: Trust, host: str) -> bool:
    return trust.dial_refusal(host) is None


@pytest.mark.parametrize("host", LOOPBACK)
def test_without_settings_this_machine_may_be_dialled_and_listened_on(host: str) -> None:
    assert may_dial(Trust(), host)
    Trust().check_bind(host)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_without_settings_nothing_else_may_and_the_text_says_what_to_do(host: str) -> None:
    refusal = Trust().dial_refusal(host) or ""
    assert refusal.startswith(f"{host} is not this machine")
    with pytest.raises(ConfigError) as caught:
        Trust().check_bind(host)
    assert f"would listen on {host}" in str(caught.value)
    for text in (refusal, str(caught.value)):
        assert all(setting in text for setting in ("--cluster-key-file", CLUSTER_KEY_VARIABLE, "--allow"))


@pytest.mark.parametrize("host", [*LOOPBACK, *ELSEWHERE])
def test_with_a_key_any_address_may_try(host: str) -> None:
    trust = allowing(key=KEY)
    trust.check_bind(host)
    assert may_dial(trust, host)
    assert trust.accepts_from(host)


def test_with_an_allow_list_only_what_is_on_it_is_dialled_and_read() -> None:
    trust = allowing("10.1.0.0/16", "192.168.0.9", "fd00::/8", "node-7")
    for host in ("10.1.2.3", "192.168.0.9", "::ffff:192.168.0.9", "fd12::1", "10.7.0.7", "fe80::7%eth1"):
        assert may_dial(trust, host)
        assert trust.accepts_from(host)
    for host in ("10.2.0.1", "192.168.0.8", "127.0.0.1", "localhost", "fe80::8", "node-8", "", "None"):
        assert not may_dial(trust, host)
        assert not trust.accepts_from(host)
    assert may_dial(trust, "NODE-7")
    assert "192.168.0.9/32" in (trust.dial_refusal("10.2.0.1") or "")
    trust.check_bind("10.1.0.1")


def test_with_both_both_must_be_right() -> None:
    trust = allowing("10.1.0.0/16", key=KEY)
    assert trust.key == KEY.encode()
    assert may_dial(trust, "10.1.0.1")
    assert not may_dial(trust, "10.2.0.1")
    assert not trust.accepts_from("10.2.0.1")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("10.0.0.1/8", "did you mean 10.0.0.0/8 or 10.0.0.1?"),
        ("10.0.0.0/33", "not an IP address, a network such as"),
        ("300.1.1.1", "not an IP address"),
        ("10.0", "not an IP address"),
        ("", "not an IP address"),
        ("a b", "not an IP address"),
        ("http://node-7", "not an IP address"),
        ("node-7/24", "not an IP address"),
        ("nobody", "no address is found for that name"),
    ],
)
def test_an_entry_that_means_nothing_is_refused_by_name(entry: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        allowing(entry)
    assert f"--allow is {entry!r}" in str(caught.value)
    assert said in str(caught.value)


def test_names_are_looked_up_for_real() -> None:
    assert parse_trust(allow=["localhost"]).accepts_from("127.0.0.1")


def key_file(directory: Path, content: str, mode: int = 0o600) -> Path:
    path = directory / "cluster.key"
    path.write_text(content)
    path.chmod(mode)
    return path


def test_the_key_of_the_file_is_stripped_and_comes_before_that_of_the_environment(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"\n {KEY}\n")
    found = parse_trust(path, {CLUSTER_KEY_VARIABLE: "another key, long enough"}).key
    assert isinstance(found, KeyFile)
    assert found.current() == (KEY.encode(),)
    assert parse_trust(None, {CLUSTER_KEY_VARIABLE: f"{KEY}\n"}).key == KEY.encode()
    assert parse_trust(None, {}).key is None


@pytest.mark.parametrize(
    ("content", "count"), [("", "0"), (" " * 20, "0"), ("15 characters..", "15"), ("x" * 5000, "more than 4096")]
)
def test_a_key_of_the_wrong_length_is_refused_by_name_and_not_shown(tmp_path: Path, content: str, count: str) -> None:
    path = key_file(tmp_path, content)
    for named, file, environment in (
        (str(path), path, {}),
        (CLUSTER_KEY_VARIABLE, None, {CLUSTER_KEY_VARIABLE: content}),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_trust(file, environment)
        assert f"holds {count} bytes" in str(caught.value)
        assert named in str(caught.value)
        assert not content.strip() or content not in str(caught.value)


def test_a_key_file_that_cannot_be_read_is_refused_by_path(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match=r"--cluster-key-file '.*; name a file") as caught:
            parse_trust(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_key_file_that_others_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warns: bool
) -> None:
    with caplog.at_level(logging.WARNING):
        parse_trust(key_file(tmp_path, KEY, mode))
    assert ("chmod 600" in caplog.text) is warns
    assert KEY not in caplog.text


def test_no_text_shows_the_key() -> None:
    trust = allowing("node-7", key=KEY)
    assert KEY not in repr(trust)
    assert KEY not in str(trust)
    assert KEY not in (trust.dial_refusal("10.2.0.1") or "")
