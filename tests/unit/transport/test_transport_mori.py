"""What only `mori` has: settings of its backends, and send queues that are full. The contract suite has the rest."""

from __future__ import annotations

import select
from typing import Any

import numpy as np
import pytest

from kvbaton.core.handoff import Incarnation
from kvbaton.errors import ConfigError, TransportError
from kvbaton.transport.base import Batch, Completion, Direction, PeerRank, Region, TransportSettings
from kvbaton.transport.mori import MoriTransport
from mori_stand_in import MoriWorld, PollCqMode, RdmaBackendConfig, XgmiBackendConfig

SOURCE, TARGET = PeerRank(Incarnation("source")), PeerRank(Incarnation("target"))
BLOCK = 64


def make(world: MoriWorld, memory: np.ndarray[Any, Any], **settings: Any) -> MoriTransport:
    return MoriTransport(Region.of(memory), TransportSettings(**settings), world.api())


def read_blocks(world: MoriWorld, blocks: int, **settings: Any) -> tuple[Completion, bool]:
    """Read scattered blocks; how it ended, and whether every byte is right."""
    there = np.random.default_rng(1).integers(0, 255, 2 * blocks * BLOCK, dtype=np.uint8)
    here = np.full_like(there, 255)
    source, target = make(world, there), make(world, here, **settings)
    try:
        target.connect(SOURCE, source.endpoint())
        at = np.arange(0, 2 * blocks, 2, dtype=np.uint64) * np.uint64(BLOCK)
        runs = np.stack([at, at[::-1], np.full(blocks, BLOCK, np.uint64)], axis=1)
        target.post(Batch(SOURCE, Direction.READ, runs))
        assert select.select([target.wakeup_fd], [], [], 30)[0]
        expected = np.full_like(there, 255)
        for a, b, count in runs.tolist():
            expected[b : b + count] = there[a : a + count]
        return target.poll()[0], np.array_equal(here, expected)
    finally:
        target.close()
        source.close()


def test_the_backend_is_set_up_as_the_settings_say_and_nobody_is_notified() -> None:
    world = MoriWorld()
    make(world, np.zeros(8, np.uint8), library={"mori_queue_pairs": 4, "mori_workers": 2, "mori_post_batch": 16}).close()
    assert world.backends == [RdmaBackendConfig(4, 16, 2, PollCqMode.EVENT, enable_notification=False)]
    make(world, np.zeros(8, np.uint8), library={"mori_backend": "xgmi"}).close()
    assert world.backends[1] == XgmiBackendConfig()
    assert not world.engines


def test_a_full_send_queue_is_asked_for_less() -> None:
    world = MoriWorld(send_queue=100)
    completion, is_right = read_blocks(world, 1000)
    assert (completion.error, completion.moved_bytes, is_right) == ("", 1000 * BLOCK, True)
    assert not world.engines


@pytest.mark.parametrize("send_queue", [100, 4096])
def test_blocks_are_written_however_short_the_send_queue(send_queue: int) -> None:
    world, blocks = MoriWorld(send_queue=send_queue), 1000
    here = np.random.default_rng(1).integers(0, 255, 2 * blocks * BLOCK, dtype=np.uint8)
    there = np.full_like(here, 255)
    source, target = (make(world, memory, unfenced_writes=True) for memory in (here, there))
    try:
        source.connect(TARGET, target.endpoint())
        at = np.arange(0, 2 * blocks, 2, dtype=np.uint64) * np.uint64(BLOCK)
        source.post(Batch(TARGET, Direction.WRITE, np.stack([at, at[::-1], np.full(blocks, BLOCK, np.uint64)], axis=1)))
        assert select.select([source.wakeup_fd], [], [], 30)[0]
        assert [(each.error, each.moved_bytes) for each in source.poll()] == [("", blocks * BLOCK)]
        rows = here.reshape(-1, BLOCK)
        assert np.array_equal(there.reshape(-1, BLOCK)[::2], rows[::2][::-1])
        assert (there.reshape(-1, BLOCK)[1::2] == 255).all()
    finally:
        source.close()
        target.close()
    assert not world.engines


def test_a_send_queue_that_stays_full_is_an_error_in_time() -> None:
    completion, is_right = read_blocks(MoriWorld(send_queue=0), 3, timeout_s=0.3)
    assert "no progress within 0.3 s" in completion.error
    assert not is_right


def test_over_xgmi_every_byte_comes_without_a_mark() -> None:
    world = MoriWorld()
    source, target = (make(world, np.full(64, fill, np.uint8), library={"mori_backend": "xgmi"}) for fill in (1, 0))
    assert source.endpoint().details["marks"] == ""
    target.connect(SOURCE, source.endpoint())
    target.post(Batch(SOURCE, Direction.READ, np.array([[0, 0, 64]], np.uint64)))
    assert select.select([target.wakeup_fd], [], [], 30)[0]
    assert target.poll()[0].error == ""
    target.close()
    source.close()


def test_two_backends_do_not_meet() -> None:
    world = MoriWorld()
    source = make(world, np.zeros(8, np.uint8), library={"mori_backend": "xgmi"})
    target = make(world, np.zeros(8, np.uint8))
    with pytest.raises(TransportError, match="backend is 'xgmi', here it is 'rdma'"):
        target.connect(SOURCE, source.endpoint())
    target.close()
    source.close()


def test_without_mori_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"needs MoRI on a machine with ROCm.*choose another transport"):
        MoriTransport(Region.of(bytearray(8)), TransportSettings())


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="mori_backend is 'pigeon'"):
        TransportSettings(library={"mori_backend": "pigeon"})
