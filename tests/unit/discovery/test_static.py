"""Instances from a file: kept alive while they are on it, gone when they are not, and a broken file changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbaton.discovery.registry import Registry
from kvbaton.discovery.static import StaticInstances, read_instances
from kvbaton.errors import ConfigError


def entry(kind: str = "P", port: int = 9000, **more: Any) -> dict[str, Any]:
    address = f"host:127.0.0.1,handshake:{port},notify:{port}"
    return {"type": kind, "http_address": f"127.0.0.1:{port}", "zmq_address": address, "transfer_mode": "WRITE", **more}


def write(path: Path, *entries: Any) -> Path:
    path.write_text(json.dumps(entries))
    return path


def live(registry: Registry, now: float) -> list[str]:
    return [instance.http_address for instance in registry.live(now)]


def test_they_live_as_long_as_they_are_on_the_list(tmp_path: Path) -> None:
    registry = Registry(expire_after_s=5.0)
    path = write(tmp_path / "instances.json", entry(), entry("D", 9001))
    static = StaticInstances(path, registry)
    for now in range(60):
        static.refresh(float(now))
    assert live(registry, 60.0) == ["127.0.0.1:9000", "127.0.0.1:9001"]
    write(path, entry("D", 9001), entry("P", 9002, dp_size=2))
    static.refresh(61.0)
    assert sorted(live(registry, 61.0)) == ["127.0.0.1:9001", "127.0.0.1:9002"]


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(expire_after_s=5.0)
    path = write(tmp_path / "instances.json", entry())
    static = StaticInstances(path, registry)
    static.refresh(0.0)
    path.write_text("{")
    for now in range(1, 20):
        static.refresh(float(now))
    assert live(registry, 20.0) == ["127.0.0.1:9000"]
    assert len(caplog.records) == 1
    path.unlink()
    static.refresh(30.0)
    assert live(registry, 30.0) == ["127.0.0.1:9000"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", "no JSON list of instances"),
        ("{}", "no JSON list of instances"),
        (json.dumps([entry(), entry(type="X")]), "entry 1: type: 'X' is unknown"),
        (json.dumps([entry(http_address="http://h:1")]), "entry 0: http_address: .* has a scheme"),
        (json.dumps([entry(bootstrap_port=-1)]), "entry 0: bootstrap_port"),
        (json.dumps([entry(dispatch="pigeon")]), "entry 0: dispatch: 'pigeon' is unknown"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "instances.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_instances(path)
    with pytest.raises(ConfigError):
        read_instances(tmp_path / "missing")
