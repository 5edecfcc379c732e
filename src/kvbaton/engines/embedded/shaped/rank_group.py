"""The leader's side of an instance in several processes: starts its ranks, runs steps on them, and detects when one dies."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.agent.channel import Channel, ChannelClosed, ChannelStuck, channel_pair
from kvbaton.core.auth import ClusterKey
from kvbaton.core.handoff import BlockLists
from kvbaton.engines.embedded.model import TokenSpan, Written
from kvbaton.engines.embedded.shaped import rank_messages
from kvbaton.engines.embedded.shaped.blueprint import WHOLE, Blueprint, Cut
from kvbaton.engines.embedded.shaped.memory import group_specs, lists_of
from kvbaton.engines.embedded.shaped.rank_messages import GroupSettings, Links, RankKey, RankSetup, rank_name
from kvbaton.errors import Bug, LocalError

__all__ = ["RankGroup", "RankLost", "RemoteCache", "RemoteModel"]

log = logging.getLogger(__name__)

_READY_S = 120.0
_END_S = 5.0
_CULPRIT_S = 1.0
_TURN_S = 1.0
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class RankLost(LocalError):
    """A rank of this instance has died, failed or does not reply; the instance cannot go on."""


class _Rank:
    """One rank process as its leader sees it."""

    def __init__(self, cut: Cut, process: subprocess.Popen[bytes], steps: Channel, agent: Channel) -> None:
        self.cut = cut
        self.name = rank_name(cut)
        self.process = process
        self.steps = steps
        self.agent = agent

    def receive(self, until: float) -> rank_messages.RankReply:
        """Its next reply. Raises RankLost when none arrives until then, or the process is gone."""
        try:
            frame = self.steps.receive(until - time.monotonic())
        except (ChannelClosed, ChannelStuck) as error:
            raise RankLost(f"{self.name} (process {self.process.pid}) is lost: {error}") from error
        if frame is None:
            raise RankLost(f"{self.name} (process {self.process.pid}) does not reply")
        return rank_messages.decode_reply(frame)

    def send(self, frame: bytes, timeout_s: float) -> None:
        """Send an order to it. Raises RankLost."""
        try:
            self.steps.send(frame, timeout_s)
        except (ChannelClosed, ChannelStuck) as error:
            raise RankLost(f"{self.name} (process {self.process.pid}) is lost: {error}") from error


class RankGroup:
    """All rank processes of one instance. `lost` is called once, from a thread of the group, when one of them has died."""

    def __init__(self, settings: GroupSettings, lost: Callable[[str], None], cluster_key: ClusterKey = b"") -> None:
        self.settings = settings
        self._lost = lost
        self._problem = ""
        self._is_closing = threading.Event()
        self._close_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.ranks = _start_ranks(settings, cluster_key)
        self._watcher = threading.Thread(target=self._watch, name="kvbaton-ranks", daemon=True)
        until = time.monotonic() + _READY_S
        try:
            self.ready = [self._wait_ready(rank, until) for rank in self.ranks]
        except BaseException:
            self.close()
            raise
        self._watcher.start()

    @property
    def agents(self) -> list[Channel]:
        """The channels to the rank agents, by the number of the rank."""
        return [rank.agent for rank in self.ranks]

    def run(self, spans: Sequence[TokenSpan], written: Written | None) -> npt.NDArray[np.float32]:
        """Run one step on all ranks; `written` is called for a layer when all ranks of its stage have written it.

        Raises RankLost, and from then on always.
        """
        order = rank_messages.RunStep(tuple(rank_messages.to_wire(span) for span in spans), written is not None)
        replies = _StepReplies(self.settings, written)
        self._order_all(msgspec.msgpack.encode(order), replies.take)
        return np.frombuffer(replies.logits, np.float32).reshape(len(spans), -1)

    def poison(self, blocks: Sequence[int]) -> None:
        """Poison these blocks on every rank, and wait until that is done. Raises RankLost."""
        self._order_all(
            msgspec.msgpack.encode(rank_messages.Poison(tuple(blocks))),
            lambda _, reply: isinstance(reply, rank_messages.Poisoned),
        )

    def close(self) -> None:
        """Close the channels, wait a bounded time for the ranks to end, and kill the rest. Idempotent."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        os.eventfd_write(self._close_fd, 1)
        if self._watcher.is_alive():
            self._watcher.join(_END_S)
        for rank in self.ranks:
            rank.steps.close()
            rank.agent.close()
        until = time.monotonic() + _END_S
        for rank in self.ranks:
            _end(rank.process, until)
        os.close(self._close_fd)

    def _order_all(self, frame: bytes, take: Callable[[_Rank, rank_messages.RankReply], bool]) -> None:
        """Send an order to every rank, and take replies until `take` has returned true for each rank."""
        if self._problem:
            raise RankLost(self._problem)
        try:
            until = time.monotonic() + self.settings.step_s
            for rank in self.ranks:
                rank.send(frame, self.settings.step_s)
            self._take_all(take, until)
        except RankLost as error:
            self._problem = str(error)
            raise

    def _take_all(self, take: Callable[[_Rank, rank_messages.RankReply], bool], until: float) -> None:
        waiting = {rank.steps.fileno(): rank for rank in self.ranks}
        poll = select.poll()
        for number in waiting:
            poll.register(number, select.POLLIN)
        while waiting:
            ready = poll.poll(max(0.0, min(_TURN_S, until - time.monotonic())) * 1000)
            if not ready and time.monotonic() >= until:
                names = ", ".join(rank.name for rank in waiting.values())
                raise RankLost(f"no reply to a step in {self.settings.step_s:g} s from {names}; the instance cannot go on")
            for number, _ in ready:
                rank = waiting[number]
                reply = rank.receive(until)
                if isinstance(reply, rank_messages.StepFailed):
                    raise RankLost(f"{rank.name} (process {rank.process.pid}) failed in a step: {reply.reason}")
                if take(rank, reply):
                    del waiting[number]
                    poll.unregister(number)

    def _wait_ready(self, rank: _Rank, until: float) -> rank_messages.RankReady:
        reply = rank.receive(until)
        if not isinstance(reply, rank_messages.RankReady):
            raise Bug(f"{rank.name} sends {type(reply).__name__} before it is ready")
        return reply

    def _watch(self) -> None:
        """Wait until a rank dies, or the group is closed."""
        poll = select.poll()
        poll.register(self._close_fd, select.POLLIN)
        with ExitStack() as opened:
            ranks = {}
            for rank in self.ranks:
                number = os.pidfd_open(rank.process.pid)
                opened.callback(os.close, number)
                poll.register(number, select.POLLIN)
                ranks[number] = rank
            while not self._is_closing.is_set():
                dead = [ranks[number] for number, _ in poll.poll(_TURN_S * 1000) if number in ranks]
                if dead and not self._is_closing.is_set():
                    self._report_lost(dead[0])
                    return

    def _report_lost(self, first: _Rank) -> None:
        """Report the rank that failed first: its neighbours end too, with exit code 0, because it is gone."""
        until = time.monotonic() + _CULPRIT_S
        while not (culprits := [rank for rank in self.ranks if rank.process.poll()]) and time.monotonic() < until:
            self._is_closing.wait(_CULPRIT_S / 20)
        rank = culprits[0] if culprits else first
        code = rank.process.poll()
        self._problem = f"{rank.name} (process {rank.process.pid}) has died with exit code {code}; the instance cannot go on"
        log.error("%s", self._problem)
        self._lost(self._problem)


class _StepReplies:
    """The replies to one step."""

    def __init__(self, settings: GroupSettings, written: Written | None) -> None:
        self.logits = b""
        self._settings = settings
        self._written = written
        self._writers: Counter[int] = Counter()

    def take(self, rank: _Rank, reply: rank_messages.RankReply) -> bool:
        """Take one reply of a rank; true when it was the last one."""
        match reply:
            case rank_messages.LayerWritten():
                self._writers[reply.layer] += 1
                if self._written is not None and self._writers[reply.layer] == self._settings.shape.tp:
                    self._written(reply.layer)
                return False
            case rank_messages.StepDone():
                self.logits = reply.logits or self.logits
                return True
            case _:
                raise Bug(f"{rank.name} replies to a step with {type(reply).__name__}")


class RemoteModel:
    """The model of an instance whose ranks are processes, with the interface of a local model."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def forward(self, spans: Sequence[TokenSpan], cache: object, written: Written | None = None) -> npt.NDArray[np.float32]:
        """Run a step on all ranks, over their own caches. Raises RankLost."""
        del cache
        return self._group.run(spans, written)


class RemoteCache:
    """The cache of an instance whose ranks are processes, as the scheduler sees it: all ranks use the same block numbers."""

    def __init__(self, blueprint: Blueprint, group: RankGroup) -> None:
        self._group = group
        self._specs = group_specs(blueprint, WHOLE)
        self.shares_prefixes = blueprint.shares_prefixes
        self.blocks = group.settings.blocks
        self.block_tokens = group.settings.block_tokens

    def block_lists(self, blocks: Sequence[int]) -> BlockLists:
        """The blocks of one sequence: one list per group of the layout."""
        return lists_of(self._specs, blocks)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks on every rank with a pattern."""
        self._group.poison(blocks)


def _start_ranks(settings: GroupSettings, cluster_key: ClusterKey) -> list[_Rank]:
    """Start one process per rank, each with its ends of the sockets; the leader closes its copies of those ends."""
    cuts = settings.cuts
    sockets: dict[int, dict[str, list[socket.socket]]] = {cut.rank: {} for cut in cuts}
    leader = {cut.rank: [_link(sockets, cut.rank, name) for name in ("steps", "agent")] for cut in cuts}
    for cut in cuts:
        first = cut.pp_rank * cut.tp_size
        if cut.tp_rank:
            _join(sockets, (first, "stage"), (cut.rank, "stage"))
        if cut.pp_rank:
            _join(sockets, (cut.rank - cut.tp_size, "after"), (cut.rank, "before"))
    ranks = []
    try:
        for cut in cuts:
            process = _start_rank(settings, cut, sockets[cut.rank], cluster_key)
            steps, agent = (Channel(each, rank_name(cut)) for each in leader[cut.rank])
            ranks.append(_Rank(cut, process, steps, agent))
    except BaseException:
        for rank in ranks:
            _end(rank.process, time.monotonic())
        raise
    finally:
        for ends in sockets.values():
            for each in (end for named in ends.values() for end in named):
                each.close()
    return ranks


def _link(sockets: dict[int, dict[str, list[socket.socket]]], rank: int, name: str) -> socket.socket:
    ours, theirs = channel_pair()
    sockets[rank].setdefault(name, []).append(theirs)
    return ours


def _join(sockets: dict[int, dict[str, list[socket.socket]]], one: tuple[int, str], other: tuple[int, str]) -> None:
    for (rank, name), end in zip((one, other), channel_pair(), strict=True):
        sockets[rank].setdefault(name, []).append(end)


def _start_rank(
    settings: GroupSettings, cut: Cut, ends: dict[str, list[socket.socket]], cluster_key: ClusterKey
) -> subprocess.Popen[bytes]:
    numbers = {name: tuple(end.fileno() for end in named) for name, named in ends.items()}
    links = Links(
        steps=numbers["steps"][0],
        agent=numbers["agent"][0],
        stage=numbers.get("stage", ()),
        before=next(iter(numbers.get("before", ())), None),
        after=next(iter(numbers.get("after", ())), None),
    )
    setup = msgspec.json.encode(RankSetup(settings, cut, links)).decode()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvbaton.engines.embedded.shaped.rank_process", setup],
        stdin=subprocess.PIPE,
        env={**os.environ, **_ONE_THREAD},
        pass_fds=links.numbers(),
    )
    _send_key(process, cluster_key)
    return process


def _send_key(process: subprocess.Popen[bytes], cluster_key: ClusterKey) -> None:
    """Write the key to a pipe that only the process reads; it fits the buffer. The watcher reports a dead process."""
    assert process.stdin is not None  # noqa: S101
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(msgspec.json.encode(RankKey.of(cluster_key)))


def _end(process: subprocess.Popen[bytes], until: float) -> None:
    try:
        process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_S)
