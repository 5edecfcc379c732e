"""Names of transports."""

from __future__ import annotations

import resource
import threading

import pytest

from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region, TransportSettings
from kvbaton.transport.choose import check_writes, open_transport
from kvbaton.transport.neighbour import files_left
from kvbaton.transport.table import TRANSPORTS


@pytest.mark.parametrize("name", sorted(name for name, entry in TRANSPORTS.items() if entry.stands_alone))
def test_a_name_opens_its_transport(name: str) -> None:
    transport = open_transport(name, Region.of(bytearray(8)), TransportSettings())
    assert (transport.name, transport.endpoint().transport, transport.endpoint().region_bytes) == (name, name, 8)
    transport.close()


@pytest.mark.parametrize("name", ["auto", "local", "tcp"])
def test_nothing_is_opened_where_descriptors_would_run_out(name: str) -> None:
    left, most = files_left()
    threads = threading.active_count()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most - left + 12, hard))
    try:
        with pytest.raises(ConfigError, match=f"transport {name} needs up to .* descriptors to open, and 1. of .*ulimit -n"):
            open_transport(name, Region.of(bytearray(8)), TransportSettings())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert files_left()[0] >= left
    assert threading.active_count() <= threads


def test_unknown_names_are_refused_with_the_nearest_and_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown transport 'nixi' \(did you mean nixl\?\); known are auto, cuda, local, m",
    ):
        open_transport("nixi", Region.of(bytearray(8)), TransportSettings())


@pytest.mark.parametrize("name", ["auto", "cuda", "local", "tcp"])
def test_writes_are_refused_where_a_transport_only_reads(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unfenced_writes is on, and transport {name} .*choose mooncake, mori, nixl"):
        open_transport(name, Region.of(bytearray(8)), TransportSettings(unfenced_writes=True))
    check_writes(name, unfenced_writes=False)


@pytest.mark.parametrize("name", ["mooncake", "mori", "nixl"])
def test_writes_can_be_chosen_where_a_library_writes(name: str) -> None:
    check_writes(name, unfenced_writes=True)


def test_memory_of_the_wrong_kind_is_refused_with_what_to_choose() -> None:
    with pytest.raises(ConfigError, match=r"moves GPU memory.*choose transport local or nixl or tcp"):
        open_transport("cuda", Region.of(bytearray(8)), TransportSettings())
    for name in ("local", "mooncake"):
        with pytest.raises(ConfigError, match=f"transport {name} moves main memory.*choose transport cuda or nixl or tcp"):
            open_transport(name, Region(4096, 8, memoryview(b"")), TransportSettings())
