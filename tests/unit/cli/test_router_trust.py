"""The cluster key of `kvbaton router`: from a file or the environment, and never shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli.router import router
from kvbaton.config import CLUSTER_KEY_VARIABLE
from kvbaton.core.auth import keys_of
from kvbaton.router import app
from kvbaton.router.settings import RouterSettings

KEY = "a key of more than sixteen bytes"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[RouterSettings]:
    """The settings of each router that would have been started."""
    found: list[RouterSettings] = []

    async def keep(settings: RouterSettings, *_more: Any) -> None:
        found.append(settings)

    monkeypatch.setattr(app, "serve_router", keep)
    return found


def test_the_key_of_a_file_reaches_the_router(served: list[RouterSettings], tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    assert router(cluster_key_file=path) == 0
    assert served[0].cluster_key is not None
    assert keys_of(served[0].cluster_key) == (KEY.encode(),)
    assert KEY not in repr(served[0])


def test_the_key_of_the_environment_reaches_the_router(
    served: list[RouterSettings], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CLUSTER_KEY_VARIABLE, KEY)
    assert router() == 0
    assert served[0].cluster_key == KEY.encode()
    assert "NO CLUSTER KEY" not in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.7"])
def test_listening_without_a_key_is_logged_loudly(
    host: str, served: list[RouterSettings], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(CLUSTER_KEY_VARIABLE, raising=False)
    assert router(discovery_host=host) == 0
    assert served[0].cluster_key is None
    assert [record.levelname for record in caplog.records if "NO CLUSTER KEY" in record.message] == ["WARNING"]
