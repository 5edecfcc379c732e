"""Several processes on one port: one takes registrations in and forwards them, all share their counts on one board.

The first process owns the discovery socket and starts the workers, which bind the same port; the kernel spreads
connections over them. It forwards each registration that may matter, with the slot in which the instance's load is
counted. A worker that could not reach an instance, or reached it again, reports that to the first process, which forwards it:
the other workers must not have to fail a request of their own to find out. Workers are forked before there are threads or an
event loop, and begin with nothing but the memory that all share and their end of a socket. A worker that dies is replaced;
workers end when the first process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import uvloop

from kvbaton.discovery.listener import Listener
from kvbaton.discovery.messages import Registration, decode_registration, encode_registration
from kvbaton.discovery.registry import Instance, Outcome, Refreshed, RegistrationRefused, Registry, Standing
from kvbaton.discovery.static import StaticInstances
from kvbaton.errors import ConfigError
from kvbaton.router.app import MAX_SLOTS, RouterCore, listener_of, new_board
from kvbaton.router.board import Board, Loads
from kvbaton.router.metrics import COLUMNS, GAUGES, write_messages
from kvbaton.router.routed import Rings
from kvbaton.router.settings import RouterSettings
from kvbaton.router.slots import InstanceKey, SlotBook, instance_key

__all__ = ["run_processes"]

_logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_SWEEP_S = 0.1
_RESEND_S = 0.5
_RESTART_S = 0.5
_MAX_MESSAGE = 65536
_MOST_MISSED = 4096
_READY = b"ready"


class _RegistrationUpdate(msgspec.Struct, array_like=True, tag="news"):
    """A registration for the workers, the slot of its instance, and whether the first process has admitted it."""

    slot: int
    frame: bytes
    is_admitted: bool


class _StandingUpdate(msgspec.Struct, array_like=True, tag="held"):
    """The strikes of an instance, from a worker to the first process and from there to the others."""

    standing: Standing


class _DeathUpdate(msgspec.Struct, array_like=True, tag="death"):
    """The digest of a body that an instance died of, from a worker to the first process and from there to the others."""

    digest: bytes


@dataclass(slots=True)
class _Worker:
    """A worker process and our end of its socket."""

    row: int
    pid: int
    channel: socket.socket
    started: float
    is_over: bool = False
    """Whether it has ended, and its process id may belong to another process."""
    missed: dict[InstanceKey, _RegistrationUpdate] = field(default_factory=dict)
    """What could not be sent because it did not keep up: the last message of each instance."""


class _PublishingRegistry(Registry):
    """The first process's registry: what it takes in is forwarded to the workers."""

    def __init__(self, settings: RouterSettings, publish: Callable[[Registration, Outcome, float], None]) -> None:
        is_keyed = settings.cluster_key is not None
        super().__init__(
            settings.transfer_mode,
            settings.expire_after_s,
            is_keyed=is_keyed,
            notices_pauses=True,
            first_fixes_mode=settings.first_fixes_mode,
        )
        self._publish = publish

    def register(self, message: Registration, now: float, *, is_listed: bool = False, is_decided: bool = False) -> Outcome:
        """Take in one message, and forward it."""
        outcome = super().register(message, now, is_listed=is_listed, is_decided=is_decided)
        self._publish(message, outcome, now)
        return outcome


def run_processes(settings: RouterSettings, ready: Callable[[], None] | None = None) -> int:
    """Run a router of several processes until SIGINT or SIGTERM; the exit code. Raises ConfigError before anything runs."""
    return _Head(settings).run(ready)


class _SharingRegistry(Registry):
    """A worker's registry: strikes of instances are reported to the other processes."""

    def __init__(self, settings: RouterSettings, publish: Callable[[Standing], None]) -> None:
        super().__init__(settings.transfer_mode, settings.expire_after_s, notices_pauses=True)
        self._publish = publish

    def report_lost(self, instance: Instance, now: float) -> float | None:
        """Quarantine an instance, here and in the other processes."""
        aside_s = super().report_lost(instance, now)
        if aside_s is not None:
            self._publish(self.standing(instance, now))
        return aside_s

    def report_reached(self, instance: Instance) -> bool:
        """Clear the strikes of an instance, here and in the other processes."""
        had_strikes = super().report_reached(instance)
        if had_strikes:
            self._publish(self.standing(instance, time.monotonic()))
        return had_strikes


class _Head:
    """The first process."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._board = new_board(settings.processes + 1)
        self._rings = Rings(settings.processes)
        self._slots = SlotBook(MAX_SLOTS)
        self._loads = Loads(self._board, settings.processes, COLUMNS)
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._published: dict[tuple[str, str, str], float] = {}
        self._stopping = False

    def run(self, ready: Callable[[], None] | None) -> int:
        """Start the workers, take registrations in, and keep the workers going."""
        _check_port(self._settings)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        registry = _PublishingRegistry(self._settings, self._publish)
        static = None if self._settings.instances_file is None else StaticInstances(self._settings.instances_file, registry)
        self._workers = [self._start(row) for row in range(self._settings.processes)]
        try:
            self._await_ready()
            with listener_of(self._settings, registry) as listener:
                if ready is not None:
                    ready()
                while not self._stopping:
                    self._look(registry, listener, static)
                    self._read_workers(registry)
        finally:
            self._end_workers()
        return 0

    def _look(self, registry: Registry, listener: Listener, static: StaticInstances | None) -> None:
        now = time.monotonic()
        listener.check()
        if static is not None:
            static.refresh(now)
        registry.expire(now)
        with self._lock:
            live = {instance_key(instance.registration) for instance in registry.live(now)}
            self._slots.keep(live, now, self._loads.of)
            self._published = {key: sent_at for key, sent_at in self._published.items() if key in live}
        self._count_messages(listener)
        self._send_missed()
        self._replace_dead(registry, now)

    def _count_messages(self, listener: Listener) -> None:
        write_messages(self._board.row(self._settings.processes), listener.messages_total(), listener.malformed_total())

    def _publish(self, message: Registration, outcome: Outcome, now: float) -> None:
        """Pass on what changes something at once, and heartbeats often enough."""
        key = instance_key(message)
        with self._lock:
            if (
                isinstance(outcome, Refreshed | RegistrationRefused)
                and now - self._published.get(key, float("-inf")) < _RESEND_S
            ):
                return
            self._published[key] = now
            for worker in self._workers:
                self._send_to(worker, key, self._update(message, not isinstance(outcome, RegistrationRefused)))

    def _update(self, message: Registration, is_admitted: bool) -> _RegistrationUpdate:
        return _RegistrationUpdate(self._slots.slot_of(instance_key(message)), encode_registration(message), is_admitted)

    def _send_to(self, worker: _Worker, key: InstanceKey, update: _RegistrationUpdate) -> None:
        worker.missed.pop(key, None)
        if not self._send(worker, update) and len(worker.missed) < _MOST_MISSED:
            worker.missed[key] = update

    def _send(self, worker: _Worker, update: _RegistrationUpdate | _StandingUpdate | _DeathUpdate) -> bool:
        """False when the worker does not keep up. One that is dead is replaced, and its successor is sent everything."""
        try:
            worker.channel.send(msgspec.msgpack.encode(update))
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _send_missed(self) -> None:
        """A long list of instances arrives at once, each time; without this, the end of the list would never be sent."""
        with self._lock:
            for worker in self._workers:
                for key, update in list(worker.missed.items()):
                    self._send_to(worker, key, update)
                    if key in worker.missed:
                        break

    def _read_workers(self, registry: Registry) -> None:
        """Read for a moment what workers report about instances."""
        channels = {worker.channel: worker for worker in self._workers}
        for channel in select.select(list(channels), [], [], _LOOK_S)[0]:
            try:
                content = channel.recv(_MAX_MESSAGE)
            except OSError:
                content = b""
            if not content:
                time.sleep(_LOOK_S)
            elif content != _READY:
                self._pass_on(content, channels[channel], registry)

    def _pass_on(self, content: bytes, sender: _Worker, registry: Registry) -> None:
        try:
            report = msgspec.msgpack.decode(content, type=_StandingUpdate | _DeathUpdate)
        except msgspec.MsgspecError:
            _logger.error("router: process %d reports: %s", sender.pid, content.decode(errors="replace"))
            return
        if isinstance(report, _StandingUpdate):
            registry.adopt(report.standing, time.monotonic())
        with self._lock:
            for worker in self._workers:
                if worker is not sender:
                    self._send(worker, report)

    def _replace_dead(self, registry: Registry, now: float) -> None:
        for index, worker in enumerate(self._workers):
            if os.waitpid(worker.pid, os.WNOHANG)[0] == 0:
                continue
            _logger.error("router: process %d died; starting another", worker.pid)
            worker.channel.close()
            self._board.clear(worker.row, COLUMNS)
            self._board.clear(worker.row, 0, GAUGES)
            if now - worker.started < _RESTART_S:
                time.sleep(_RESTART_S)
            with self._lock:
                self._workers[index] = self._start(worker.row)
            for instance in registry.live(now):
                message = instance.registration
                self._send_to(self._workers[index], instance_key(message), self._update(message, is_admitted=True))
                if instance.strikes:
                    self._send(self._workers[index], _StandingUpdate(registry.standing(instance, now)))

    def _start(self, row: int) -> _Worker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for worker in self._workers:
                worker.channel.close()
            os._exit(_run_worker(self._settings, self._board, self._rings, row, theirs))
        theirs.close()
        ours.setblocking(False)
        return _Worker(row, pid, ours, time.monotonic())

    def _await_ready(self) -> None:
        for worker in self._workers:
            worker.channel.settimeout(30.0)
            try:
                report = worker.channel.recv(_MAX_MESSAGE)
            except OSError as error:
                raise ConfigError(f"process {worker.pid} of the router did not start ({error}); see its log") from error
            finally:
                worker.channel.setblocking(False)
            if report != _READY:
                raise ConfigError(report.decode(errors="replace") or "a process of the router ended while it started")

    def _stop(self, _number: int, _frame: object) -> None:
        if self._stopping:
            for worker in self._workers:
                if not worker.is_over:
                    _kill(worker.pid, signal.SIGKILL)
        self._stopping = True

    def _end_workers(self) -> None:
        """Each worker drains; one that does not end in time is killed."""
        for worker in self._workers:
            _kill(worker.pid, signal.SIGTERM)
        give_up_at = time.monotonic() + self._settings.drain_timeout_s + 5.0
        for worker in self._workers:
            while os.waitpid(worker.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > give_up_at:
                    _kill(worker.pid, signal.SIGKILL)
                time.sleep(0.02)
            worker.is_over = True
            worker.channel.close()


def _run_worker(settings: RouterSettings, board: Board, rings: Rings, row: int, channel: socket.socket) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_work(settings, board, rings, row, channel))
    except Exception:
        _logger.exception("router: a process failed; this is a bug")
        return 1
    return 0


async def _work(settings: RouterSettings, board: Board, rings: Rings, row: int, channel: socket.socket) -> None:
    """One worker: serve the port with what the first process forwards, until it is asked to stop or the first one is gone."""
    registry = _SharingRegistry(settings, lambda standing: _send_to_head(channel, _StandingUpdate(standing)))
    core = RouterCore(settings, registry, board, rings, row)
    core.dispatcher.deaths.report = lambda digest: _send_to_head(channel, _DeathUpdate(digest))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    try:
        await core.server.open()
    except ConfigError as error:
        channel.send(str(error).encode()[:_MAX_MESSAGE])
        return
    channel.send(_READY)
    channel.setblocking(False)
    loop.add_reader(channel.fileno(), _read_head, channel, core, stopping)
    while not stopping.is_set():
        core.sweep(time.monotonic())
        try:
            await asyncio.wait_for(stopping.wait(), _SWEEP_S)
        except TimeoutError:
            continue
    loop.remove_reader(channel.fileno())
    await core.stop()


def _read_head(channel: socket.socket, core: RouterCore, stopping: asyncio.Event) -> None:
    """Take in updates from the first process; its end ends this one too."""
    try:
        content = channel.recv(_MAX_MESSAGE)
    except BlockingIOError:
        return
    except OSError:
        content = b""
    if not content:
        stopping.set()
        return
    update = msgspec.msgpack.decode(content, type=_RegistrationUpdate | _StandingUpdate | _DeathUpdate)
    if isinstance(update, _StandingUpdate):
        core.registry.adopt(update.standing, time.monotonic())
        return
    if isinstance(update, _DeathUpdate):
        core.dispatcher.deaths.add(update.digest, time.monotonic())
        return
    message = decode_registration(update.frame)
    if isinstance(message, Registration):
        core.slots.assign(instance_key(message), update.slot)
        # The first process sees every message; judged here again, from fewer heartbeats, a claim could end differently.
        core.registry.register(message, time.monotonic(), is_decided=update.is_admitted)


def _send_to_head(channel: socket.socket, report: _StandingUpdate | _DeathUpdate) -> None:
    """The first process may be busy; then the others find out by themselves."""
    with contextlib.suppress(OSError):
        channel.send(msgspec.msgpack.encode(report))


def _check_port(settings: RouterSettings) -> None:
    """SO_REUSEPORT hides that another program has the port; look before."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise ConfigError(
                f"router address {settings.host}:{settings.port} cannot be bound ({error.strerror or error}); stop what uses"
                " the port, or choose another with --port"
            ) from error


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
