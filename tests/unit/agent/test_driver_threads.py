"""Every control socket is used from one thread: the driver's, from its start to its end (row 39 of the vLLM facts)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from driver_rig import landed, pair

from kvbaton.agent.sockets import ControlSockets
from kvbaton.core.handoff import Incarnation
from kvbaton.launch.ports import PortPicker

USES = ("dial", "send", "wait", "receive")


def test_row_39_sockets_are_used_from_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    users: dict[int, set[str]] = {}

    def noting(use: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: ControlSockets, *arguments: Any) -> Any:
            users.setdefault(id(self), set()).add(threading.current_thread().name)
            return use(self, *arguments)

        return noted

    for name in USES:
        monkeypatch.setattr(ControlSockets, name, noting(getattr(ControlSockets, name)))
    with pair() as (source, target):
        for number in range(5):
            landed(source, target, f"thread-{number}")
    assert len(users) == 2
    assert all(names == {"kvbaton-agent"} for names in users.values())
    other = ControlSockets(Incarnation("other"), "127.0.0.1", PortPicker().pick())
    other.wait(0.0, [])
    other.close()
    assert users[id(other)] == {threading.current_thread().name}, "the check itself must see a foreign thread"
