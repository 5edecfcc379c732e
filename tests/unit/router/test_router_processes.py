"""Several processes of a router on one port: they share instances, loads and counts, and a dead one is replaced."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from router_fakes import free_port

from kvbaton.discovery.announcer import ThreadAnnouncer
from kvbaton.discovery.messages import InstanceType, Registration, TransferMode, decode_registration, encode_registration
from kvbaton.router.processes import _Head, _PublishingRegistry, _RegistrationUpdate, _Worker
from kvbaton.router.settings import RouterSettings
from kvbaton.wire.zmtp import encode_frame
from watching import descendants, pause, wait_until

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
ANSWER = b'{"choices":[],"kv_transfer_params":{"transfer_id":"x"}}'
SERVER = """
import http.server, sys, threading, time
lock, here, most = threading.Lock(), 0, 0
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        global here, most
        self.rfile.read(int(self.headers["Content-Length"]))
        with lock:
            here += 1
            most = max(most, here)
        time.sleep(float(sys.argv[2]))
        with lock:
            here -= 1
        self.answer(sys.argv[3].encode())
    def do_GET(self):
        self.answer(str(most).encode())
    def answer(self, body):
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def registration(kind: InstanceType, port: int) -> Registration:
    return Registration(
        type=kind,
        http_address=f"127.0.0.1:{port}",
        zmq_address=f"host:127.0.0.1,handshake:{port},notify:{port}",
        transfer_mode=TransferMode.WRITE,
        incarnation=f"inc-{port}",
    )


class Group:
    """A router of several processes."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        port: int,
        discovery_port: int,
        instances: list[int],
        servers: list[subprocess.Popen[bytes]],
    ) -> None:
        self.process = process
        self.port = port
        self.instances = instances
        self.servers = servers
        self.discovery_port = discovery_port

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", body, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def metric(self, line: str) -> float:
        text = self.ask("/metrics")[1].decode()
        return next((float(row.rpartition(" ")[2]) for row in text.splitlines() if row.startswith(f"{line} ")), 0.0)


@contextmanager
def group(*more: str, processes: int = 2, delay_s: float = 0.0) -> Iterator[Group]:
    ports = [free_port() for _ in range(4)]
    servers = [subprocess.Popen([sys.executable, "-c", SERVER, str(port), str(delay_s), ANSWER.decode()]) for port in ports[:2]]
    command = [sys.executable, "-m", "kvbaton.cli.main", "router", "--port", str(ports[2]), "--discovery-port", str(ports[3])]
    router = subprocess.Popen([*command, "--processes", str(processes), *more])
    announcers = [
        ThreadAnnouncer(registration(kind, port), [f"127.0.0.1:{ports[3]}"], heartbeat_s=0.3)
        for kind, port in zip(InstanceType, ports[:2], strict=True)
    ]
    try:
        for announcer in announcers:
            announcer.start()
        running = Group(router, ports[2], ports[3], ports[:2], servers)
        for _ in range(8):
            wait_until(lambda: running.ask("/ready")[0] == 200, "every process knows both instances")
        yield running
    finally:
        for announcer in announcers:
            announcer.stop()
        router.terminate()
        for process in (router, *servers):
            if process is not router:
                process.kill()
            process.wait(20)


def test_all_processes_serve_and_count_together_and_a_dead_one_is_replaced() -> None:
    with group() as router:
        workers = descendants(router.process.pid)
        assert len(workers) == 2
        assert {router.ask("/v1/completions", b'{"prompt":"x"}')[0] for _ in range(20)} == {200}
        # A process counts an answer when it is out: its client may ask before that.
        answered = 'kvbaton_router_requests_total{path="/v1/completions",status="2xx"}'
        wait_until(lambda: router.metric(answered) == 20, "every answer is counted")
        wait_until(lambda: router.metric("kvbaton_router_in_flight_requests") == 0, "none is counted as under way")
        os.kill(min(workers), signal.SIGKILL)
        wait_until(
            lambda: len(descendants(router.process.pid)) == 2 and min(workers) not in descendants(router.process.pid), "back"
        )
        wait_until(lambda: all(router.ask("/ready")[0] == 200 for _ in range(8)), "the new one knows the instances")
        assert {router.ask("/v1/completions", b'{"prompt":"x"}')[0] for _ in range(20)} == {200}
        left = descendants(router.process.pid)
        router.process.send_signal(signal.SIGTERM)
        assert router.process.wait(20) == 0
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in left), "no process is left")  # noqa: PTH110


def strikes_against_decode(router: Group) -> list[int]:
    """What several processes answer, each asked over a connection of its own."""
    answers = [json.loads(router.ask("/instances")[1] or b'{"live":[]}')["live"] for _ in range(16)]
    return [instance["strikes"] for live in answers for instance in live if instance["type"] == "D"]


def test_a_process_that_stood_still_finds_its_instances_alive() -> None:
    """Requests wait for it as well as heartbeats, and whichever it reads first, no request is refused."""
    body = json.dumps({"prompt": "x"}).encode()
    with group("--expire-after-s", "1") as running, ThreadPoolExecutor(24) as pool:
        worker = min(descendants(running.process.pid))
        pause(worker)
        try:
            asked = [pool.submit(running.ask, path, body) for path in ("/v1/completions",) * 16]
            asked += [pool.submit(running.ask, "/ready") for _ in range(8)]
            wait_until(lambda: sum(each.done() for each in asked) >= 4, "the other process serves")
            threading.Event().wait(2.5)  # longer than an instance may be silent
            assert not all(each.done() for each in asked), "some wait for the process that stands still"
        finally:
            os.kill(worker, signal.SIGCONT)
        assert {each.result(30)[0] for each in asked} == {200}


def test_what_one_process_holds_against_an_instance_all_do() -> None:
    """One request, so one process, finds decode gone; a replaced process gets it too, and an answer clears it for all."""
    with group() as router:
        assert strikes_against_decode(router) == [0] * 16
        router.servers[1].kill()
        router.servers[1].wait(20)
        assert router.ask("/v1/completions", b'{"prompt":"x"}')[0] == 502
        wait_until(lambda: all(strikes_against_decode(router)), "every process holds it against decode")
        assert router.metric("kvbaton_router_quarantines_total") == 1
        os.kill(min(descendants(router.process.pid)), signal.SIGKILL)
        wait_until(lambda: len(strikes_against_decode(router)) == 16, "the dead one is replaced")
        wait_until(lambda: all(strikes_against_decode(router)), "the new process knows")
        again = [sys.executable, "-c", SERVER, str(router.instances[1]), "0", ANSWER.decode()]
        router.servers[1] = subprocess.Popen(again)
        try:
            wait_until(lambda: router.ask("/v1/completions", b'{"prompt":"x"}')[0] == 200, "decode is back")
            wait_until(lambda: not any(strikes_against_decode(router)), "no process counts it against decode any more")
        finally:
            router.servers[1].kill()
            router.servers[1].wait(20)


def test_every_process_lists_the_handoffs_of_all() -> None:
    with group() as router:
        assert {router.ask("/v1/completions", b'{"prompt":"x"}')[0] for _ in range(20)} == {200}
        for _ in range(8):
            listed = json.loads(router.ask("/handoffs")[1])["handoffs"]
            assert len({line["transfer_id"] for line in listed}) == 20
            assert {(line["prefill"], line["decode"]) for line in listed} == {
                (f"127.0.0.1:{router.instances[0]}", f"127.0.0.1:{router.instances[1]}")
            }


def test_a_cap_holds_for_all_processes_together() -> None:
    """Two at a time, whichever processes the requests reach; the others wait, and are all served."""
    with group("--max-per-decode", "2", delay_s=0.05) as router, ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: router.ask("/v1/completions", b'{"prompt":"x"}'), range(64)))
        assert {status for status, _ in replies} == {200}
        with urllib.request.urlopen(f"http://127.0.0.1:{router.instances[1]}/", timeout=30) as answer:
            assert answer.read() == b"2"


def flood(port: int, stopping: threading.Event) -> None:
    """Registrations of ever new instances, a thousand at a time, ten times a second or as fast as they are taken.

    They are of a mode that the router does not take: one that is admitted would also be tried.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sender:
        sender.sendall(GREETING + READY)
        number = 0
        while not stopping.wait(0.1):
            unknown = [registration(InstanceType.DECODE, 1 + (number + n) % 60000) for n in range(1000)]
            refused = [msgspec.structs.replace(each, transfer_mode=TransferMode.READ) for each in unknown]
            sender.sendall(b"".join(encode_frame(encode_registration(each)) for each in refused))
            number += 1000


def memory_kib(pid: int) -> int:
    pids = [pid, *descendants(pid)]
    return sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in pids) * os.sysconf("SC_PAGE_SIZE") // 1024


@pytest.mark.parametrize("processes", [1, 2])
def test_a_flood_of_registrations_is_dropped_and_no_request_notices(processes: int) -> None:
    stopping = threading.Event()
    with group("--transfer-mode", "WRITE", processes=processes) as router, ThreadPoolExecutor(1) as pool:
        assert router.ask("/v1/completions", b'{"prompt":"x"}')[0] == 200
        before = memory_kib(router.process.pid)
        flooding = pool.submit(flood, router.discovery_port, stopping)
        too_many = 'kvbaton_router_malformed_registrations_total{cause="too_many"}'
        try:
            wait_until(lambda: router.metric(too_many) > 2000, "the flood is dropped", 60)
            assert {router.ask("/v1/completions", b'{"prompt":"x"}')[0] for _ in range(30)} == {200}
        finally:
            stopping.set()
            flooding.result(30)
        live = {instance["http_address"] for instance in json.loads(router.ask("/instances")[1])["live"]}
        assert {f"127.0.0.1:{port}" for port in router.instances} <= live
        assert memory_kib(router.process.pid) - before < 32 * 1024


def test_a_worker_receives_later_what_it_had_no_room_for() -> None:
    """A long list of instances is more than its socket holds at once."""
    settings = RouterSettings(processes=2)
    head = _Head(settings)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
        head._workers = [_Worker(0, 0, ours, 0.0)]
        registry = _PublishingRegistry(settings, head._publish)
        listed = [registration(kind, 10_000 + number) for number, kind in enumerate([*InstanceType] * 500)]
        for one in listed:
            registry.register(one, 0.0)
        assert head._workers[0].missed, "the socket holds it all; this shows nothing"
        registry.register(msgspec.structs.replace(listed[-1], bye=True), 0.0)
        received: list[Registration] = []
        while fresh := list(_received(theirs)):
            received += fresh
            head._send_missed()
    assert {one.http_address for one in received} == {one.http_address for one in listed}
    assert [one.bye for one in received if one.http_address == listed[-1].http_address] == [True]


def _received(channel: socket.socket) -> Iterator[Registration]:
    with suppress(BlockingIOError):
        while True:
            message = decode_registration(msgspec.msgpack.decode(channel.recv(65536), type=_RegistrationUpdate).frame)
            assert isinstance(message, Registration)
            yield message


def test_a_second_signal_ends_what_is_left_at_once() -> None:
    """Also when some of the processes had nothing to finish and are gone by then."""
    with group(processes=6, delay_s=60.0) as router, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(router.ask, "/v1/completions", b'{"prompt":"x"}')
        wait_until(lambda: router.metric("kvbaton_router_in_flight_requests") == 1, "a request is on its way")
        workers = descendants(router.process.pid)
        router.process.send_signal(signal.SIGTERM)
        wait_until(lambda: len(descendants(router.process.pid)) == 1, "the idle ones have ended")
        is_first_busy = min(workers) in descendants(router.process.pid)
        wait_until(lambda: is_first_busy or not os.path.exists(f"/proc/{min(workers)}"), "gone")  # noqa: PTH110
        router.process.send_signal(signal.SIGTERM)
        assert router.process.wait(20) == 0
        assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)  # noqa: PTH110
        assert waiting.result(20)[0] == 0


def test_a_port_in_use_is_named() -> None:
    with group() as router:
        command = [sys.executable, "-m", "kvbaton.cli.main", "router", "--port", str(router.port), "--processes", "2"]
        second = subprocess.run(
            [*command, "--discovery-port", str(free_port())], capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == 2
        assert f"127.0.0.1:{router.port} cannot be bound" in second.stderr.replace("\n", " ")
