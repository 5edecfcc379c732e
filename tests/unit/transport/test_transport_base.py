"""Regions and settings."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region, TransportSettings


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.dtype([("k", "<f4"), ("v", "<f4")])])
def test_a_region_is_the_memory_of_its_array(dtype: Any) -> None:
    array = np.zeros((3, 4), dtype)
    region = Region.of(array)
    assert (region.address, region.region_bytes) == (array.ctypes.data, array.nbytes)
    region.view[0] = 1
    assert array.view(np.uint8).reshape(-1)[0] == 1


def test_a_region_of_other_buffers() -> None:
    raw = bytearray(10)
    Region.of(raw).view[9] = 7
    assert raw[9] == 7
    with mmap.mmap(-1, 4096) as pages:
        region = Region.of(pages)
        region.view[1] = 9
        assert pages[1] == 9
        del region


@pytest.mark.parametrize(
    "buffer", [np.zeros(0, np.uint8), np.zeros((4, 4))[:, ::2], np.frombuffer(b"abc", np.uint8), bytearray()]
)
def test_what_cannot_be_a_region_is_refused(buffer: Any) -> None:
    with pytest.raises(ConfigError, match="writable, contiguous, non-empty"):
        Region.of(buffer)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
        ("max_in_flight", 0),
        ("max_peers", -1),
        ("slice_bytes", 1 << 30),
        ("launch_bytes", 1 << 31),
        ("launch_bytes", 0),
        ("port", 65536),
    ],
)
def test_bad_settings_are_named(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        TransportSettings(**{setting: value})
