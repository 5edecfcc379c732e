"""What SGLang's queues see of a request before a sender or receiver exists."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvbaton.engines.sglang.hooks import _add


@pytest.mark.parametrize("host", [None, 7, ["127.0.0.1"]])
def test_a_request_without_a_bootstrap_host_reaches_sglang_with_a_text(host: object) -> None:
    """SGLang's scheduler ends when it makes an address of anything else."""
    request = SimpleNamespace(bootstrap_host=host, finished=lambda: False)
    assert _add(lambda _queue, added: added.bootstrap_host, None, request) == ""


def test_a_bootstrap_host_reaches_sglang_as_it_is() -> None:
    request = SimpleNamespace(bootstrap_host="10.0.0.1", finished=lambda: False)
    assert _add(lambda _queue, added: added.bootstrap_host, None, request) == "10.0.0.1"
