"""MoRI-IO's behaviours, on the drop-in: operations, sessions, batches, ranges, notices, threads, restarts, bad input.

Where two engines exchange something, over each path: main memory by `local` and by `tcp`, a stand-in for memory of a GPU, and
memory of a GPU where there is one.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mori_peer import MoriPeer, mori_peer

from gpu_memories import GPU, MAIN, STAND_IN, place, use_stand_in, why_not_here
from kvbaton.compat.mori import cpp
from kvbaton.compat.mori import engine as engine_module
from kvbaton.compat.mori.io import (
    BackendType,
    EngineDesc,
    IOEngine,
    IOEngineConfig,
    IOEngineSession,
    MemoryDesc,
    MemoryLocationType,
    PollCqMode,
    RdmaBackendConfig,
    StatusCode,
    XgmiBackendConfig,
    set_log_level,
)
from kvbaton.verify.stored import StoredCounts
from watching import pause

TransferStatus = cpp.TransferStatus
_KEYS = itertools.count()
_LIMIT_MS = 30_000
_CPU = MemoryLocationType.CPU
_PATHS = {"auto": MAIN, "tcp": MAIN, "stand-in GPU": STAND_IN, "GPU": GPU}


class _Kind:
    """The kind of memory that tests use now."""

    now = MAIN


class _Memory:
    """Registered memory with this content; `loc` is its label, which decides nothing."""

    def __init__(self, engine: IOEngine, content: npt.NDArray[np.uint8], loc: MemoryLocationType = _CPU, skip: int = 0) -> None:
        self.memory = place(_Kind.now, content, skip)
        self.desc = engine.register_memory(self.memory.address, self.memory.nbytes, -1, loc)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        return self.memory.array


def _engine(backend: BackendType | None = BackendType.RDMA, config: Any = None, key: str = "") -> IOEngine:
    engine = IOEngine(key or f"engine-{next(_KEYS)}", IOEngineConfig("127.0.0.1", 0))
    if backend is not None:
        engine.create_backend(backend, config)
    return engine


def _acquaint(*engines: IOEngine) -> None:
    for one, other in itertools.permutations(engines, 2):
        one.register_remote_engine(EngineDesc.unpack(other.get_engine_desc().pack()))


def _random(size: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8)


def _done(status: Any) -> None:
    assert status.WaitFor(_LIMIT_MS) is StatusCode.SUCCESS, status.Message()


def _notice(engine: IOEngine, key: str, uid: int) -> bool:
    deadline = time.monotonic() + 10
    while engine.pop_inbound_transfer_status(key, uid) is None:
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.001)
    return True


@pytest.fixture(params=_PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind = _PATHS[request.param]
    if why := why_not_here(kind):
        pytest.skip(why)
    if kind == STAND_IN:
        use_stand_in(monkeypatch.setattr)
    monkeypatch.setattr(_Kind, "now", kind)
    monkeypatch.setenv("KVBATON_MORI", request.param if kind == MAIN else "auto")
    return str(request.param)


@pytest.fixture
def pair(path: str) -> tuple[IOEngine, IOEngine]:
    one, other = _engine(), _engine()
    _acquaint(one, other)
    return one, other


@pytest.mark.parametrize("size", [8, 8192])
@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("is_batch", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize("has_session", [False, True], ids=["engine", "session"])
def test_operations(
    pair: tuple[IOEngine, IOEngine], has_session: bool, is_batch: bool, operation: str, count: int, size: int
) -> None:
    here, there = pair
    mine, theirs = _Memory(here, _random(count * size)), _Memory(there, _random(count * size, 1))
    moved = (theirs if operation == "read" else mine).array.copy()
    offsets = [at * size for at in random.Random(count).sample(range(count), count)]
    uids: list[int] = []
    if has_session:
        session = here.create_session(mine.desc, theirs.desc)
        assert session is not None
        if is_batch:
            uids.append(session.allocate_transfer_uid())
            statuses = [getattr(session, f"batch_{operation}")(offsets, offsets, [size] * count, uids[0])]
        else:
            uids += [session.allocate_transfer_uid() for _ in offsets]
            statuses = [getattr(session, operation)(at, at, size, uid) for at, uid in zip(offsets, uids, strict=True)]
    elif is_batch:
        uids.append(here.allocate_transfer_uid())
        batch = getattr(here, f"batch_{operation}")
        statuses = batch([mine.desc], [offsets], [theirs.desc], [offsets], [[size] * count], uids)
    else:
        uids += [here.allocate_transfer_uid() for _ in offsets]
        single = getattr(here, operation)
        statuses = [single(mine.desc, at, theirs.desc, at, size, uid) for at, uid in zip(offsets, uids, strict=True)]
    assert here.wait_all(statuses, _LIMIT_MS) is StatusCode.SUCCESS
    assert {status.Message() for status in statuses} == {"success"}
    assert (mine.array == theirs.array).all()
    assert (mine.array == moved).all()
    key = here.get_engine_desc().key
    assert all(_notice(there, key, uid) for uid in uids)
    assert there.pop_inbound_transfer_status(key, max(uids) + 1) is None


@pytest.mark.usefixtures("path")
def test_a_control_that_stores_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, location, is_stored in (("1", _CPU, False), ("gpu", _CPU, True), ("gpu", MemoryLocationType.GPU, False)):
        monkeypatch.setenv("KVBATON_MORI_DROP_WRITES", value)
        one, other = _engine(), _engine()
        _acquaint(one, other)
        mine, theirs = _Memory(one, _random(64), location), _Memory(other, _random(64, 1), location)
        for operation in (one.read, one.write):
            _done(operation(mine.desc, 0, theirs.desc, 0, 64, 1))
            assert (mine.array == theirs.array).all() == is_stored


def test_several_pairs_of_memories_in_one_call(pair: tuple[IOEngine, IOEngine]) -> None:
    here, there = pair
    mine = [_Memory(here, _random(4096, seed)) for seed in range(3)]
    theirs = [_Memory(there, np.zeros(4096, np.uint8)) for _ in range(3)]
    uids = [here.allocate_transfer_uid() for _ in range(3)]
    offsets, sizes = [[0, 2048]] * 3, [[1024, 512]] * 3
    statuses = here.batch_write([m.desc for m in mine], offsets, [t.desc for t in theirs], offsets, sizes, uids)
    assert len(statuses) == 3
    assert here.wait_all(statuses) is StatusCode.SUCCESS
    for source, target in zip(mine, theirs, strict=True):
        for start, length in ((0, 1024), (2048, 512)):
            assert (source.array[start : start + length] == target.array[start : start + length]).all()
        assert not target.array[1024:2048].any()
    assert all(_notice(there, here.get_engine_desc().key, uid) for uid in uids)


def test_strided_shuffled_and_unequal_runs(pair: tuple[IOEngine, IOEngine]) -> None:
    here, there = pair
    mine, theirs = _Memory(here, _random(1 << 20)), _Memory(there, np.zeros(1 << 20, np.uint8))
    session = here.create_session(mine.desc, theirs.desc)
    assert session is not None
    draw = random.Random(4)
    sources = draw.sample(range(0, 1 << 20, 4096), 200)
    targets = draw.sample(range(0, 1 << 20, 4096), 200)
    sizes = [draw.choice([1, 7, 512, 4095, 4096]) for _ in sources]
    _done(session.batch_write(tuple(sources), targets, np.array(sizes).tolist(), 1))
    expected, sent = np.zeros(1 << 20, np.uint8), mine.array
    for source, target, size in zip(sources, targets, sizes, strict=True):
        expected[target : target + size] = sent[source : source + size]
    assert (theirs.array == expected).all()


def test_a_view_into_a_larger_allocation_moves_the_views_bytes(pair: tuple[IOEngine, IOEngine]) -> None:
    here, there = pair
    view, target = _Memory(there, _random(4096), skip=700_001), _Memory(here, np.zeros(4096, np.uint8), skip=77)
    _done(here.read(target.desc, 0, MemoryDesc.unpack(view.desc.pack()), 0, 4096, 1))
    assert (target.array == _random(4096)).all()


@pytest.mark.usefixtures("path")
def test_one_engine_can_be_both_ends() -> None:
    engine = _engine(BackendType.XGMI, XgmiBackendConfig())
    one, other = (_Memory(engine, _random(4096, seed), MemoryLocationType.GPU) for seed in range(2))
    _done(engine.read(one.desc, 0, other.desc, 0, 4096, 1))
    assert (one.array == other.array).all()
    assert engine.pop_inbound_transfer_status(engine.get_engine_desc().key, 1) is None


@pytest.mark.usefixtures("path")
def test_the_target_needs_not_know_the_initiator() -> None:
    here, there = _engine(), _engine()
    here.register_remote_engine(there.get_engine_desc())
    mine, theirs = _Memory(here, _random(64)), _Memory(there, np.zeros(64, np.uint8))
    local = MemoryDesc.unpack(mine.desc.pack())
    session = here.create_session(local, MemoryDesc.unpack(theirs.desc.pack()))
    assert session is not None
    _done(session.write(0, 0, 64, 1))
    assert (mine.array == theirs.array).all()


class TestErrors:
    def test_ranges_fail_on_return(self, pair: tuple[IOEngine, IOEngine]) -> None:
        here, there = pair
        mine, theirs = _Memory(here, _random(64)), _Memory(there, _random(64))
        session = here.create_session(mine.desc, theirs.desc)
        assert session is not None
        for status in (
            session.batch_read((0,), (60,), (5,), 1),
            session.write(60, 0, 5, 2),
            here.read(mine.desc, 0, theirs.desc, 1 << 40, 1, 3),
            session.batch_write([0, 0], [0], [1, 1], 4),
            session.write(0, 0, 1 << 32, 5),
        ):
            assert status.Failed()
            assert status.Code() is StatusCode.ERR_INVALID_ARGS
        assert "length out of range" in session.write(60, 0, 5, 2).Message()
        _done(session.write(0, 0, 64, 6))

    def test_without_a_backend(self) -> None:
        here, there = _engine(None), _engine(None)
        _acquaint(here, there)
        mine, theirs = _Memory(here, _random(64)), _Memory(there, _random(64))
        (status,) = here.batch_read([mine.desc], [[0]], [theirs.desc], [[0]], [[8]], [1])
        assert status.Code() is StatusCode.ERR_BAD_STATE
        assert "No available backend found" in status.Message()
        assert here.create_session(mine.desc, theirs.desc) is None

    def test_a_peer_that_is_not_registered(self) -> None:
        here, there = _engine(), _engine()
        mine, theirs = _Memory(here, _random(64)), _Memory(there, _random(64))
        assert here.create_session(mine.desc, theirs.desc) is None
        assert here.write(mine.desc, 0, theirs.desc, 0, 8, 1).Code() is StatusCode.ERR_BAD_STATE

    def test_memory_that_was_deregistered(self, pair: tuple[IOEngine, IOEngine]) -> None:
        here, there = pair
        mine, theirs = _Memory(here, _random(64)), _Memory(there, np.zeros(64, np.uint8))
        session = here.create_session(mine.desc, theirs.desc)
        assert session is not None
        there.deregister_memory(theirs.desc)
        there.deregister_memory(theirs.desc)
        status = session.write(0, 0, 64, 1)
        assert status.WaitFor(_LIMIT_MS) is StatusCode.ERR_RDMA_OP
        assert not theirs.array.any()
        with pytest.raises(RuntimeError, match="got=0"):
            here.create_session(mine.desc, theirs.desc)
        here.deregister_memory(mine.desc)
        assert here.write(mine.desc, 0, theirs.desc, 0, 8, 1).Code() is StatusCode.ERR_NOT_FOUND

    @pytest.mark.usefixtures("path")
    def test_a_dead_peer(self) -> None:
        here, there = _engine(), _engine()
        _acquaint(here, there)
        mine, theirs = _Memory(here, _random(64)), _Memory(there, _random(64))
        session = here.create_session(mine.desc, theirs.desc)
        assert session is not None
        del there
        gc.collect()
        assert session.write(0, 0, 8, 1).WaitFor(_LIMIT_MS) is StatusCode.ERR_RDMA_OP
        assert session.alive()
        with pytest.raises(RuntimeError, match="no session with the peer"):
            here.create_session(mine.desc, theirs.desc)

    def test_failed_batches_do_not_stop_later_ones(self, pair: tuple[IOEngine, IOEngine]) -> None:
        here, there = pair
        mine, theirs = _Memory(here, _random(4096)), _Memory(there, np.zeros(4096, np.uint8))
        session = here.create_session(mine.desc, theirs.desc)
        assert session is not None

        def fail(_: int) -> None:
            assert session.batch_write([0, 4000], [0, 0], [64, 97], 1).Failed()

        threads = [threading.Thread(target=fail, args=(at,)) for at in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        _done(session.batch_write([0], [0], [4096], 77))
        assert _notice(there, here.get_engine_desc().key, 77)
        assert (mine.array == theirs.array).all()

    def test_an_unequal_number_of_lists(self, pair: tuple[IOEngine, IOEngine]) -> None:
        here, there = pair
        mine, theirs = _Memory(here, _random(64)), _Memory(there, _random(64))
        statuses = here.batch_write([mine.desc], [[0]], [theirs.desc, theirs.desc], [[0]], [[8]], [1])
        assert {status.Code() for status in statuses} == {StatusCode.ERR_INVALID_ARGS}

    def test_wrong_types(self, pair: tuple[IOEngine, IOEngine]) -> None:
        here, there = pair
        mine, theirs = _Memory(here, _random(64)), _Memory(there, _random(64))
        session = here.create_session(mine.desc, theirs.desc)
        assert session is not None
        wrong: list[Callable[[], object]] = [
            lambda: session.batch_write([-1], [0], [8], 1),
            lambda: session.batch_write([0.5], [0], [8], 1),  # type: ignore[list-item]
            lambda: session.batch_write(["0"], [0], [8], 1),  # type: ignore[list-item]
            lambda: session.batch_write([[0]], [[0]], [[8]], 1),  # type: ignore[list-item]
            lambda: session.write(None, 0, 8, 1),  # type: ignore[arg-type]
            lambda: here.write(mine.desc, 0, theirs.desc),
            lambda: here.create_session(mine.desc, "memory"),  # type: ignore[arg-type]
            lambda: here.register_memory("0", 8, -1, _CPU),  # type: ignore[arg-type]
            lambda: here.register_memory(4096, 8, -1, 1),  # type: ignore[arg-type]
            lambda: here.register_remote_engine(b"engine"),  # type: ignore[arg-type]
            lambda: here.deregister_memory(3),  # type: ignore[arg-type]
            lambda: here.create_backend("RDMA"),  # type: ignore[arg-type]
            lambda: IOEngine("key", None),  # type: ignore[arg-type]
            lambda: IOEngineConfig("127.0.0.1", 1 << 16),
            lambda: EngineDesc.unpack("text"),  # type: ignore[arg-type]
        ]
        for call in wrong:
            with pytest.raises(TypeError):
                call()
        for pointer, size in ((0, 8), (4096, 0), (4096, -1)):
            with pytest.raises(ValueError, match="register_memory"):
                here.register_memory(pointer, size, -1, _CPU)
        # Nothing is mapped in the first page: to the processor, what memory of a device looks like.
        with pytest.raises(ValueError, match=r"labelled GPU 3\): .*memory of a device"):
            here.register_memory(4096, 8, 3, MemoryLocationType.GPU)
        for data in (b"", b"\x00", b"\x90", b"\xc1", EngineDesc("k", "n", "h", "h", 1, 1).pack()[:-9]):
            with pytest.raises(RuntimeError):
                EngineDesc.unpack(data)
            with pytest.raises(RuntimeError):
                MemoryDesc.unpack(data)

    def test_two_engines_on_one_port(self) -> None:
        first = _engine()
        second = IOEngine("second", IOEngineConfig("127.0.0.1", first.get_engine_desc().port))
        with pytest.raises(RuntimeError, match="cannot listen"):
            second.create_backend(BackendType.RDMA)

    def test_a_descriptor_of_a_real_mori_is_refused(self, pair: tuple[IOEngine, IOEngine]) -> None:
        here, there = pair
        mine = _Memory(here, _random(64))
        foreign = MemoryDesc(there.get_engine_desc().key, 0, 0, "", 4096, 64, _CPU)
        assert MemoryDesc.unpack(foreign.pack()) == foreign
        with pytest.raises(RuntimeError, match="not one of kvbaton's"):
            here.create_session(mine.desc, foreign)


class TestDescriptors:
    def test_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = _engine()
        desc = engine.get_engine_desc()
        assert desc.port > 0
        assert desc.pid > 0
        assert desc.node_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert EngineDesc.unpack(desc.pack()) == desc
        monkeypatch.setenv("MORI_NODE_ID", "a-node")
        assert _engine(None).get_engine_desc().node_id == "a-node"
        assert IOEngine("fixed", IOEngineConfig("127.0.0.1", 4711)).get_engine_desc().port == 4711

    def test_memory(self) -> None:
        engine = _engine()
        memories = [_Memory(engine, _random(64)) for _ in range(3)]
        assert [memory.desc.id for memory in memories] == [0, 1, 2]
        desc = memories[1].desc
        assert (desc.data, desc.size, desc.loc, desc.device_id) == (memories[1].array.ctypes.data, 64, _CPU, -1)
        assert (desc.device_bus_id, len(desc.ipc_handle)) == ("", 64)
        assert MemoryDesc.unpack(desc.pack()) == desc
        engine.deregister_memory(desc)
        assert _Memory(engine, _random(64)).desc.id == 3

    @pytest.mark.parametrize(("variable", "is_filled"), [("0", True), ("1", False)])
    def test_ipc_handles_show_xgmi(self, monkeypatch: pytest.MonkeyPatch, variable: str, is_filled: bool) -> None:
        monkeypatch.setenv("MORI_DISABLE_AUTO_XGMI", variable)
        desc = _Memory(_engine(), _random(64), MemoryLocationType.GPU).desc
        assert any(desc.ipc_handle) == is_filled
        assert MemoryDesc.unpack(desc.pack()).ipc_handle == desc.ipc_handle


class TestSettings:
    def test_positions_and_defaults(self) -> None:
        config = RdmaBackendConfig(2, 8, 3, PollCqMode.EVENT, False)
        assert (config.qp_per_transfer, config.post_batch_size, config.num_worker_threads) == (2, 8, 3)
        assert (config.poll_cq_mode.name, config.enable_notification, config.chunk_bytes) == ("EVENT", False, 65536)
        assert (XgmiBackendConfig().num_streams, IOEngineConfig().port) == (64, 0)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"notif_per_qp": 0},
            {"max_chunks_per_transfer": 0},
            {"num_nics_per_transfer": 0},
            {"enable_transfer_chunking": True, "chunk_bytes": 4095},
        ],
        ids=lambda wrong: next(iter(wrong)),
    )
    def test_what_no_backend_can_be_made_with(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(RuntimeError):
            _engine(BackendType.RDMA, RdmaBackendConfig(**wrong))

    def test_backends_that_are_not_here(self) -> None:
        for kind in (BackendType.TCP, BackendType.FABRIC):
            with pytest.raises(NotImplementedError):
                _engine(kind)

    def test_a_second_backend_is_ignored(self, caplog: pytest.LogCaptureFixture) -> None:
        engine = _engine()
        port = engine.get_engine_desc().port
        engine.create_backend(BackendType.RDMA)
        assert engine.get_engine_desc().port == port
        assert "ignored" in caplog.text
        engine.remove_backend(BackendType.XGMI)
        engine.remove_backend(BackendType.RDMA)
        mine = _Memory(engine, _random(8))
        assert engine.create_session(mine.desc, mine.desc) is None

    @pytest.mark.parametrize("level", ["trace", "WARN", "warning", "", "nonsense"])
    def test_log_levels_never_raise(self, level: str) -> None:
        set_log_level(level)
        set_log_level("info")

    def test_notifications_can_be_switched_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for config, variable in ((RdmaBackendConfig(enable_notification=False), ""), (RdmaBackendConfig(), "0")):
            monkeypatch.setenv("MORI_IO_ENABLE_NOTIFICATION", variable)
            here, there = _engine(config=config), _engine(config=config)
            _acquaint(here, there)
            mine, theirs = _Memory(here, _random(64)), _Memory(there, _random(64))
            for _ in range(3):
                _done(here.write(mine.desc, 0, theirs.desc, 0, 64, 5))
            assert there.pop_inbound_transfer_status(here.get_engine_desc().key, 5) is None
            assert there.stats()["notices"] == 0

    @pytest.mark.parametrize(
        ("variables", "is_made"),
        [
            ({"MORI_IO_ENABLE_CHUNKING": "1", "MORI_IO_CHUNK_BYTES": "4095"}, False),
            ({"MORI_IO_ENABLE_CHUNKING": "true", "MORI_IO_CHUNK_BYTES": "4096", "MORI_IO_POLL_CQ_MODE": "Event"}, True),
        ],
    )
    def test_the_environment_overrides_settings(
        self, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_made: bool
    ) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        config = RdmaBackendConfig()
        if is_made:
            _engine(config=config)
            assert config.overridden().poll_cq_mode is PollCqMode.EVENT
            assert config == RdmaBackendConfig(), "the caller's own settings stay as they are"
        else:
            with pytest.raises(RuntimeError, match="chunk_bytes is 4095"):
                _engine(config=config)

    def test_a_variable_that_makes_no_sense_is_ignored_with_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("MORI_IO_QP_PER_TRANSFER", "MORI_IO_POLL_CQ_MODE", "MORI_IO_SQ_BACKOFF_TIMEOUT_US"):
            monkeypatch.setenv(name, "-3")
        assert _engine().backoff_s == 5.0
        assert caplog.text.count("it is ignored") == 3

    def test_the_environment_sets_the_level_of_the_log(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, level in (("MORI_GLOBAL_LOG_LEVEL", "ERROR"), ("MORI_IO_LOG_LEVEL", "warn")):
            monkeypatch.setenv(name, level)
            _engine()
            assert logging.getLevelName(logging.getLogger("kvbaton.mori").level) == {"warn": "WARNING"}.get(level, level)
        set_log_level("info")

    def test_what_engines_count_can_be_read_from_outside(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = StoredCounts()
        monkeypatch.setenv("KVBATON_MORI_COUNTS", kept.directory)
        here, there = _engine(), _engine()
        _acquaint(here, there)
        mine, theirs = _Memory(here, _random(64)), _Memory(there, _random(64))
        _done(here.write(mine.desc, 0, theirs.desc, 0, 64, 1))
        assert here.write(mine.desc, 0, theirs.desc, 1, 64, 2).Failed()
        counts = kept.counts()
        assert (counts["stored_bytes_total"], counts["stored_calls_total"]) == kept.totals() == (64, 1)
        assert [counts[f"{name}_total"] for name in ("posted", "succeeded", "failed")] == [2, 1, 1]
        kept.close()

    def test_uids_count_up_for_the_engine_and_its_sessions(self, pair: tuple[IOEngine, IOEngine]) -> None:
        here, there = pair
        mine, theirs = _Memory(here, _random(64)), _Memory(there, _random(64))
        session = here.create_session(mine.desc, theirs.desc)
        assert session is not None
        assert [here.allocate_transfer_uid(), session.allocate_transfer_uid(), here.allocate_transfer_uid()] == [0, 1, 2]

    def test_the_lower_layer_has_names_in_camel_case(self) -> None:
        engine = cpp.IOEngine("camel", cpp.IOEngineConfig("127.0.0.1", 0))
        engine.CreateBackend(cpp.RDMA)
        assert engine.GetEngineDesc().port > 0
        assert cpp.SUCCESS is StatusCode.SUCCESS


class TestStatus:
    def test_a_new_one_is_init(self) -> None:
        status = TransferStatus()
        assert status.Init()
        assert (status.Code(), status.Message()) == (StatusCode.INIT, "")
        assert status.WaitFor(10_000) is StatusCode.INIT

    def test_a_failure_stays_unless_it_is_set(self) -> None:
        status = TransferStatus()
        status.Update(StatusCode.SUCCESS, "good")
        status.Update(StatusCode.ERR_RDMA_OP, "bad")
        status.Update(StatusCode.SUCCESS, "good again")
        assert (status.Failed(), status.Message()) == (True, "bad")
        status.SetCode(StatusCode.SUCCESS)
        assert status.Succeeded()

    def test_waiting_ends_when_another_thread_sets_it(self) -> None:
        status = TransferStatus()
        status.SetCode(StatusCode.IN_PROGRESS)
        assert status.WaitFor(0) is StatusCode.IN_PROGRESS
        assert status.WaitFor(1) is StatusCode.IN_PROGRESS
        got: list[StatusCode] = []
        thread = threading.Thread(target=lambda: got.append(status.WaitFor()))
        thread.start()
        status.Update(StatusCode.SUCCESS, "")
        thread.join(30)
        assert got == [StatusCode.SUCCESS]

    def test_wait_all(self) -> None:
        engine = _engine(None)
        good, bad, slow, new = (TransferStatus() for _ in range(4))
        good.SetCode(StatusCode.SUCCESS)
        bad.SetCode(StatusCode.ERR_NOT_FOUND)
        slow.SetCode(StatusCode.IN_PROGRESS)
        assert engine.wait_all([]) is StatusCode.SUCCESS
        assert engine.wait_all([good, None]) is StatusCode.SUCCESS
        assert engine.wait_all([good, bad, good]) is StatusCode.ERR_NOT_FOUND
        assert engine.wait_all([slow, bad], timeout_ms=0) is StatusCode.ERR_NOT_FOUND
        assert engine.wait_all([slow, good], timeout_ms=0) is StatusCode.IN_PROGRESS
        assert engine.wait_all([slow, bad], timeout_ms=5) is StatusCode.IN_PROGRESS
        assert engine.wait_all([new], timeout_ms=5) is StatusCode.INIT

    def test_it_completes_by_polling_alone(self, pair: tuple[IOEngine, IOEngine]) -> None:
        here, there = pair
        mine, theirs = _Memory(here, _random(8 << 20)), _Memory(there, np.zeros(8 << 20, np.uint8))
        for operation in (here.write, here.read):
            status = operation(mine.desc, 0, theirs.desc, 0, 8 << 20, 1)
            deadline = time.monotonic() + 60
            while status.InProgress():
                assert time.monotonic() < deadline
            assert status.Succeeded()

    def test_an_empty_batch_succeeds_at_once(self, pair: tuple[IOEngine, IOEngine]) -> None:
        here, there = pair
        mine, theirs = _Memory(here, _random(64)), _Memory(there, _random(64))
        session = here.create_session(mine.desc, theirs.desc)
        assert session is not None
        key = here.get_engine_desc().key
        assert session.batch_write([], [], [], 8).Succeeded()
        assert _notice(there, key, 8)
        (status,) = here.batch_read([mine.desc], [[]], [theirs.desc], [[]], [[]], [9])
        assert status.Succeeded()
        assert there.pop_inbound_transfer_status(key, 9) is None


def test_many_threads_use_one_engine(pair: tuple[IOEngine, IOEngine]) -> None:
    here, there = pair
    mine, theirs = _Memory(here, _random(1 << 20)), _Memory(there, np.zeros(1 << 20, np.uint8))
    failures: list[str] = []

    def shard(at: int) -> None:
        for step in range(16):
            start = (at * 16 + step) * 4096
            offsets = [start + piece * 512 for piece in range(8)]
            status = here.batch_write([mine.desc], [offsets], [theirs.desc], [offsets], [[512] * 8], [at * 16 + step])[0]
            if here.wait_all([status], timeout_ms=_LIMIT_MS) is not StatusCode.SUCCESS:
                failures.append(status.Message())

    threads = [threading.Thread(target=shard, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert (theirs.array[: 128 * 4096] == mine.array[: 128 * 4096]).all()
    assert all(_notice(there, here.get_engine_desc().key, uid) for uid in range(128))


@pytest.mark.usefixtures("path")
def test_an_engine_that_is_dropped_gives_port_and_threads_back() -> None:
    before = threading.active_count()
    here, there = _engine(), _engine()
    _acquaint(here, there)
    mine, theirs = _Memory(here, _random(64)), _Memory(there, _random(64))
    _done(here.write(mine.desc, 0, theirs.desc, 0, 64, 1))
    ports = [engine.get_engine_desc().port for engine in (here, there)]
    del here, there
    gc.collect()
    assert threading.active_count() == before
    for port in ports:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port))


@pytest.mark.usefixtures("path")
class TestTwoProcesses:
    @pytest.fixture
    def peer(self) -> Iterator[MoriPeer]:
        with mori_peer("peer", memory=_Kind.now) as started:
            yield started

    @pytest.fixture
    def here(self, peer: MoriPeer) -> IOEngine:
        engine = _engine()
        engine.register_remote_engine(EngineDesc.unpack(peer.engine_desc))
        return engine

    def _session(self, here: IOEngine, mine: _Memory, remote: bytes) -> IOEngineSession:
        session = here.create_session(mine.desc, MemoryDesc.unpack(remote))
        assert session is not None
        return session

    def test_writes_and_reads(self, here: IOEngine, peer: MoriPeer) -> None:
        mine = _Memory(here, _random(1 << 20))
        session = self._session(here, mine, peer.register(1 << 20))
        offsets = random.Random(1).sample(range(0, 1 << 20, 4096), 256)
        _done(session.batch_write(offsets, offsets, [4096] * 256, 3))
        assert peer.content(0) == mine.array.tobytes()
        assert peer.ask("notice", key=here.get_engine_desc().key, uid=3)
        peer.ask("fill", number=0, value=9)
        _done(session.batch_read([0], [4096], [1 << 19], 4))
        got = mine.array
        assert (got[: 1 << 19] == 9).all()
        assert (got[1 << 19 :] != 9).any()

    def test_a_full_queue_is_waited_for_and_then_an_error_that_vllm_knows(
        self, peer: MoriPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first engine waits for room until the peer goes on; the second one has no time for that."""
        monkeypatch.setattr(engine_module, "_IN_FLIGHT", 2)
        engines = [_engine()]
        monkeypatch.setenv("MORI_IO_SQ_BACKOFF_TIMEOUT_US", "1000")
        engines.append(_engine())
        remote = peer.register(4096)
        memories = [_Memory(engine, _random(4096)) for engine in engines]
        for engine in engines:
            engine.register_remote_engine(EngineDesc.unpack(peer.engine_desc))
        sessions = [self._session(engine, memory, remote) for engine, memory in zip(engines, memories, strict=True)]
        pause(peer.process.pid)
        statuses = [session.batch_write([0], [0], [4096], uid) for session in sessions for uid in (1, 2)]
        refused = sessions[1].batch_write([0], [0], [4096], 3)
        assert (refused.Code(), refused.Message()[:15]) == (StatusCode.ERR_RDMA_OP, "SQ full (batch)")
        timer = threading.Timer(0.05, os.kill, (peer.process.pid, signal.SIGCONT))
        timer.start()
        _done(sessions[0].batch_write([0], [0], [4096], 3))
        timer.join()
        for status in statuses:
            _done(status)
        counts = [engine.stats() for engine in engines]
        assert [(each["posted_total"], each["failed_total"]) for each in counts] == [(4, 0), (4, 1)]

    def test_a_write_after_deregistration_changes_no_byte(self, here: IOEngine, peer: MoriPeer) -> None:
        mine = _Memory(here, _random(1 << 20))
        session = self._session(here, mine, peer.register(1 << 20, 5))
        peer.ask("deregister", number=0)
        status = session.batch_write([0], [0], [1 << 20], 3)
        assert status.WaitFor(_LIMIT_MS) is StatusCode.ERR_RDMA_OP
        assert peer.content(0) == bytes([5]) * (1 << 20)

    def test_a_restarted_peer_with_the_same_key_and_port_is_not_mistaken(self) -> None:
        here = _engine()
        mine = _Memory(here, _random(4096))
        with mori_peer("peer", memory=_Kind.now) as first:
            old_engine, old_memory = EngineDesc.unpack(first.engine_desc), first.register(4096)
            here.register_remote_engine(old_engine)
            session = self._session(here, mine, old_memory)
            _done(session.write(0, 0, 4096, 1))
        with mori_peer("peer", old_engine.port, _Kind.now) as second:
            second.register(4096, 7)
            assert session.write(0, 0, 4096, 2).WaitFor(_LIMIT_MS) is StatusCode.ERR_RDMA_OP
            with pytest.raises(RuntimeError):
                self._session(here, mine, old_memory)
            here.register_remote_engine(EngineDesc.unpack(second.engine_desc))
            status = here.write(mine.desc, 0, MemoryDesc.unpack(old_memory), 0, 4096, 3)
            assert status.WaitFor(_LIMIT_MS) is StatusCode.ERR_RDMA_OP
            assert second.content(0) == bytes([7]) * 4096
