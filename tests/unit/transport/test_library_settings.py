"""Settings of libraries, from one variable."""

from __future__ import annotations

import pytest

from kvbaton.errors import ConfigError
from kvbaton.transport.base import Region, TransportSettings
from kvbaton.transport.choose import open_transport, with_library_settings


def test_settings_are_added_and_the_others_stay() -> None:
    settings = with_library_settings(TransportSettings(timeout_s=3), "mooncake_devices=mlx5_0,mlx5_1; mori_queue_pairs=4;")
    assert settings == TransportSettings(timeout_s=3, library={"mooncake_devices": "mlx5_0,mlx5_1", "mori_queue_pairs": 4})
    assert with_library_settings(settings, "") == settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mori_queue_pair=4", "unknown setting 'mori_queue_pair'; did you mean mori_queue_pairs?"),
        ("timeout_s=4", "unknown setting 'timeout_s'"),
        ("mori_workers=many", "mori_workers is 'many'; it must be a whole number"),
        ("mori_workers=0", "mori_workers is 0; it must be at least 1"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_library_settings(TransportSettings(), text)


def test_the_variable_counts_wherever_a_transport_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBATON_TRANSPORT_SETTINGS", "mori_backend=pigeon")
    with pytest.raises(ConfigError, match="mori_backend is 'pigeon'"):
        open_transport("tcp", Region.of(bytearray(8)), TransportSettings())
