"""Which Mooncake may be asked to write: one that does not call a write done before it is. The contract suite has the rest."""

from __future__ import annotations

from importlib import metadata

import pytest

from kvbaton.errors import ConfigError
from kvbaton.transport import mooncake
from kvbaton.transport.base import TransportSettings

WRITES = TransportSettings(unfenced_writes=True)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_TCP_PROTO", raising=False)


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"mooncake": list(versions)})
    monkeypatch.setattr(metadata, "version", versions.__getitem__)


@pytest.mark.parametrize("version", ["0.3.12", "0.3.13.post1", "0.4.0", "1.0rc1"])
def test_a_release_that_acknowledges_writes_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, some=version)
    mooncake.check_acknowledges(WRITES)


@pytest.mark.parametrize(("versions", "words"), [({"some": "0.3.11.post2"}, "here it is 0.3.11"), ({}, "here it is unknown")])
def test_an_older_one_is_refused_with_both_versions(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], words: str
) -> None:
    installed(monkeypatch, **versions)
    with pytest.raises(ConfigError, match=rf"needs Mooncake 0\.3\.12 or later, .*{words}: update it"):
        mooncake.check_acknowledges(WRITES)


def test_over_rdma_any_release_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, some="0.3.1")
    mooncake.check_acknowledges(TransportSettings(unfenced_writes=True, library={"mooncake_protocol": "rdma"}))


def test_switching_acknowledgements_off_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, some="0.4.0")
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(ConfigError, match="MC_TCP_PROTO is 1; unset it"):
        mooncake.check_acknowledges(WRITES)
