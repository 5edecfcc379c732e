"""A list of instances in a file: who is on it is live, and a bad file changes nothing."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from kvbaton.discovery.messages import TransferMode, read_registration
from kvbaton.discovery.registry import Registry
from kvbaton.discovery.static import StaticInstances, read_instances
from kvbaton.errors import ConfigError


def entry(port: int, **more: Any) -> dict[str, Any]:
    zmq_address = f"host:127.0.0.1,handshake:{port + 1},notify:{port + 1}"
    return {"type": "P", "http_address": f"127.0.0.1:{port}", "zmq_address": zmq_address, "transfer_mode": "READ"} | more


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "instances.json"


def write(path: Path, content: Any) -> None:
    """As editors do: a new file in the place of the old one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(content if isinstance(content, str) else json.dumps(content))
    fresh.replace(path)


def ports(registry: Registry, now: float) -> list[int]:
    return sorted(int(i.http_address.rpartition(":")[2]) for i in registry.live(now))


def test_the_listed_are_live_for_as_long_as_the_file_is_read(path: Path) -> None:
    write(path, [entry(8101), entry(8201, type="D")])
    registry = Registry()
    static = StaticInstances(path, registry)
    for tenth in range(200):
        static.refresh(tenth / 10)
        assert ports(registry, tenth / 10) == [8101, 8201]


def test_a_long_list_is_not_gone_through_for_each_of_its_instances(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them would take seconds, every second, of the loop that serves requests."""
    write(path, [entry(8101 + number) for number in range(50)])
    registry = Registry()
    static = StaticInstances(path, registry)
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "live", None)
        for now in (0.0, 2.0, 9.0):
            static.refresh(now)
    assert len(registry.live(9.0)) == 50


def test_a_change_is_seen(path: Path) -> None:
    write(path, [entry(8101), entry(8102)])
    registry = Registry()
    static = StaticInstances(path, registry)
    static.refresh(0.0)
    write(path, [entry(8102), entry(8103)])
    static.refresh(2.0)
    assert ports(registry, 2.0) == [8102, 8103]


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]", '[{"type": "P"}]', "[" * 100_000])
def test_a_file_that_cannot_be_read_changes_nothing(path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    write(path, [entry(8101)])
    registry = Registry()
    static = StaticInstances(path, registry)
    static.refresh(0.0)
    write(path, content)
    with caplog.at_level(logging.ERROR):
        for now in (2.0, 4.0, 6.0):
            static.refresh(now)
    assert ports(registry, 6.0) == [8101]
    assert len(caplog.records) == 1
    path.unlink()
    static.refresh(8.0)
    assert ports(registry, 8.0) == [8101]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([entry(8101), entry(8102, transfer_mode="read")], r"instance 2: transfer_mode: 'read' is unknown"),
        ([entry(0)], r"instance 1: http_address"),
        ([{}], r"instance 1: type: is missing"),
        ([entry(8101, type="BYE", leaving="P")], r"instance 1: type: is a goodbye"),
        ({}, r"no JSON list"),
    ],
)
def test_a_wrong_list_is_refused_by_entry_and_field(path: Path, content: Any, expected: str) -> None:
    write(path, content)
    with pytest.raises(ConfigError, match=expected):
        read_instances(path)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"instances.json cannot be read"):
        StaticInstances(path, Registry())


def test_a_listed_instance_that_is_refused_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(path, [entry(8101), entry(8102, transfer_mode="WRITE")])
    registry = Registry(TransferMode.READ)
    static = StaticInstances(path, registry)
    for now in (0.0, 2.0, 4.0):
        static.refresh(now)
    assert ports(registry, 4.0) == [8101]
    assert caplog.text.count("refused") == 1


def test_an_instance_that_registers_too_is_known_as_it_registered(path: Path) -> None:
    write(path, [entry(8101)])
    registry = Registry()
    static = StaticInstances(path, registry)
    static.refresh(0.0)
    itself = read_registration(entry(8101, incarnation="one", model="m"))
    registry.register(itself, 0.5)  # type: ignore[arg-type]
    static.refresh(2.0)
    (instance,) = registry.live(2.0)
    assert instance.registration == itself
