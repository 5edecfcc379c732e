"""The allow-list covers the data transport of every instance, not only its control channel."""

from __future__ import annotations

from typing import cast

import pytest

from kvbaton.config import parse_trust
from kvbaton.core.handoff import Incarnation
from kvbaton.engines import instance
from kvbaton.engines.embedded.cache import RegionCache
from kvbaton.engines.embedded.shaped import rank_messages
from kvbaton.engines.embedded.shaped.rank_messages import RankTransport
from kvbaton.engines.instance import AgentSettings
from kvbaton.transport.base import Region, TransportSettings

_ALLOWED, _OTHER = "192.0.2.7", "192.0.2.8"


class _Cache:
    region = Region(0, 0, memoryview(b""))


class _Opened:
    """Stands where a transport is opened, and keeps its settings."""

    def __init__(self) -> None:
        self.settings: TransportSettings | None = None

    def __call__(self, name: str, region: Region, settings: TransportSettings) -> None:
        del name, region
        self.settings = settings

    def admits(self, address: str) -> bool:
        assert self.settings is not None
        assert self.settings.admits is not None
        return self.settings.admits(address)


def test_an_instance_of_one_rank_exchanges_data_with_allowed_addresses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = _Opened()
    monkeypatch.setattr(instance, "open_transport", opened)
    agents = AgentSettings(1, transport="tcp", trust=parse_trust(allow=[_ALLOWED]))
    agents.open_transport(Incarnation("here"), _Cache.region)
    assert opened.admits(_ALLOWED)
    assert not opened.admits(_OTHER)


def test_a_rank_process_exchanges_data_with_allowed_addresses_only(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = _Opened()
    monkeypatch.setattr(rank_messages, "open_transport", opened)
    monkeypatch.setattr(rank_messages, "dropping", lambda transport, *_: transport)

    settings = RankTransport("tcp", Incarnation("here"), 1.0, "127.0.0.1", "127.0.0.1", allow=(f"{_ALLOWED}/32",))
    rank_messages.open_rank_transport(settings, cast(RegionCache, _Cache()), b"")
    assert opened.admits(_ALLOWED)
    assert not opened.admits(_OTHER)
