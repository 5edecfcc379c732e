"""Peers of tests that are forked from a process which has imported their script: the import takes most of the time of a start.

Each is a process of its own with a memory of its own, as one that is started by its command line is; only what the script
imports is there already. The process that forks them runs nothing else: it has no thread, and nothing is open in it.

Run as a script, this is that process: `forked_peers.py fork FD SCRIPT` forks a peer for each order on the socket FD, and
`forked_peers.py run SCRIPT …` is one peer.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NoReturn

__all__ = ["PeerProcess", "start_peer"]

_START_S = 60.0
_MOST_FDS = 8
_ORDER_BYTES = 65536
_ABOVE = 100
"""Descriptors that a peer is given are put here first, above all that it can want them as."""


class PeerProcess:
    """What tests use of a `subprocess.Popen`, for a process that another one has forked; or for `started`."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], started: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._started = started
        self._pidfd = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing happens when it has ended."""
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        """Wait until it has ended."""
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise TimeoutError(f"peer {self.pid} has not ended after {timeout} s")

    def close(self, timeout: float) -> None:
        """Kill it, wait until it has ended, and close what led to it. Again nothing happens."""
        if self.stdout.closed:
            return
        self.kill()
        self.wait(timeout)
        for each in (self.stdin, self.stdout):
            each.close()
        os.close(self._pidfd)
        if self._started is not None:
            self._started.wait(timeout)


def start_peer(script: Path, arguments: Sequence[str], pass_fds: Sequence[int] = (), prefix: Sequence[str] = ()) -> PeerProcess:
    """Have the `main` of `script` run in a process of its own, with these arguments, and with `pass_fds` open as here.

    With a `prefix` of its command line, which puts it elsewhere, it is started by that and not forked.
    """
    if not prefix:
        return _forker(script).fork(arguments, pass_fds)
    command = [*prefix, sys.executable, __file__, "run", str(script), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=pass_fds)
    assert process.stdin is not None
    assert process.stdout is not None
    return PeerProcess(process.pid, process.stdin, process.stdout, process)


@functools.cache
def _forker(script: Path) -> _Forker:
    return _Forker(script)


class _Forker:
    """The process that has imported one script; ends with this one."""

    def __init__(self, script: Path) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, "fork", str(theirs.fileno()), str(script)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        self._orders.settimeout(_START_S)

        def end() -> None:
            self._orders.close()
            process.wait(_START_S)

        atexit.register(end)

    def fork(self, arguments: Sequence[str], pass_fds: Sequence[int]) -> PeerProcess:
        """A new peer."""
        (input_there, input_here), (output_here, output_there) = os.pipe(), os.pipe()
        order = json.dumps({"arguments": [*arguments], "descriptors": [0, 1, *pass_fds]}).encode()
        socket.send_fds(self._orders, [order], [input_there, output_there, *pass_fds])
        for fd in (input_there, output_there):
            os.close(fd)
        answer = self._orders.recv(_ORDER_BYTES)
        assert answer, "the process that forks peers has ended"
        return PeerProcess(int(answer), os.fdopen(input_here, "wb"), os.fdopen(output_here, "rb"))


def _become(main: Callable[[], None], orders: socket.socket, order: bytes, given: list[int]) -> NoReturn:
    """Be a peer until `main` has returned."""
    code = 1
    try:
        orders.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        request = json.loads(order)
        above = [fcntl.fcntl(fd, fcntl.F_DUPFD, _ABOVE) for fd in given]
        for fd in given:
            os.close(fd)
        for fd, wanted in zip(above, request["descriptors"], strict=True):
            os.dup2(fd, wanted)
            os.close(fd)
        sys.stdin, sys.stdout = os.fdopen(0, "r"), os.fdopen(1, "w")
        sys.argv[1:] = request["arguments"]
        main()
        sys.stdout.flush()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the process that forks must not go on twice
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _fork_all(orders: socket.socket, main: Callable[[], None]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system takes note of their ends, and keeps nothing for this process
    while True:
        order, given, _, _ = socket.recv_fds(orders, _ORDER_BYTES, _MOST_FDS)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            _become(main, orders, order, given)
        for fd in given:
            os.close(fd)
        orders.send(str(pid).encode())


def _main_of(script: str) -> Callable[[], None]:
    # As if the script had been started: what lies beside it can be imported.
    sys.path.insert(0, str(Path(script).parent))
    main: Callable[[], None] = importlib.import_module(Path(script).stem).main
    return main


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.argv[1:] = sys.argv[2:]
        _main_of(sys.argv.pop(1))()
    else:
        with socket.socket(fileno=int(sys.argv[2])) as socket_of_orders:
            os.set_inheritable(socket_of_orders.fileno(), False)
            _fork_all(socket_of_orders, _main_of(sys.argv[3]))
