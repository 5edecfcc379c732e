"""Every instance is restarted in turn while requests run: no request fails, in push and in pull."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from system import Reply, Stand, blocks

from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Mode
from watching import wait_until

pytestmark = pytest.mark.e2e


class Load:
    """Clients that ask without a pause, until they are stopped."""

    def __init__(self, stand: Stand, clients: int) -> None:
        self.replies: list[Reply] = []
        self._stand = stand
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            self.replies.append(self._stand.client.complete(f"client {number} request {count}", max_tokens=4))

    @property
    def failed(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.status != 200]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", list(Mode))
def test_no_request_fails_while_every_instance_is_restarted(mode: Mode) -> None:
    handoff = HandoffSettings(mode=mode)
    with Stand() as stand:
        for role in ("prefill", "decode"):
            for number in range(2):
                stand.start(f"{role}-{number}", role, handoff=handoff)
        stand.wait_for("live", 4)
        with Load(stand, 4) as load:
            wait_until(lambda: len(load.replies) >= 10, "requests run")
            for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
                before = {instance["incarnation"] for instance in stand.instances("live")}
                os.kill(stand.fleets[name].pid(name), signal.SIGTERM)
                stand.fleets.pop(name).stop()
                stand.start(name, name.partition("-")[0], handoff=handoff)
                wait_until(
                    lambda before=before: (
                        len({i["incarnation"] for i in stand.instances("live")} - before) == 1  # type: ignore[misc]
                        and len(stand.instances("live")) == 4
                    ),
                    f"{name} is back",
                )
                seen = len(load.replies)
                wait_until(lambda seen=seen: len(load.replies) >= seen + 8, "requests still run")  # type: ignore[misc]
        assert [reply.content for reply in load.failed] == []
        assert {reply.document["kvbaton"]["handed_off"] for reply in load.replies} == {True}


def test_blocks_come_back_when_no_decode_instance_takes_them() -> None:
    """Pull, and the only decode instance is dead but still registered: prefill is notified, long before its lease ends."""
    with Stand() as stand:
        port = stand.start("prefill", "prefill", handoff=HandoffSettings(mode=Mode.PULL))
        stand.start("decode", "decode", handoff=HandoffSettings(mode=Mode.PULL))
        stand.wait_for("live", 2)
        assert stand.client.complete().status == 200
        stand.kill("decode")
        reply = stand.client.complete()
        assert reply.status in (502, 503)
        wait_until(lambda: blocks(port)["held"] == 0, "nothing is held")
