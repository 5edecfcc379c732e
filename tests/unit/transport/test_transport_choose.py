"""Names of transports."""

from __future__ import annotations

import pytest

from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region, TransportSettings
from kvbaton.transport.choose import TRANSPORTS, open_transport


@pytest.mark.parametrize("name", sorted(TRANSPORTS))
def test_a_name_opens_its_transport(name: str) -> None:
    transport = open_transport(name, Region.of(bytearray(8)), TransportSettings())
    assert (transport.name, transport.endpoint().transport, transport.endpoint().region_bytes) == (name, name, 8)
    transport.close()


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown transport 'pigeon'; known are local, tcp"):
        open_transport("pigeon", Region.of(bytearray(8)), TransportSettings())
