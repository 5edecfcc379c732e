"""Several processes of a router on one port: they share instances, loads and counts, and a dead one is replaced."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from router_fakes import free_port

from kvbaton.discovery.announcer import ThreadAnnouncer
from kvbaton.discovery.messages import InstanceType, Registration, TransferMode
from watching import descendants, wait_until

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

    def __init__(self, process: subprocess.Popen[bytes], port: int, instances: list[int]) -> None:
        self.process = process
        self.port = port
        self.instances = instances

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
        running = Group(router, ports[2], ports[:2])
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
        assert router.metric('kvbaton_router_requests_total{path="/v1/completions",status="2xx"}') == 20
        assert router.metric("kvbaton_router_in_flight_requests") == 0
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


def test_a_cap_holds_for_all_processes_together() -> None:
    """Two at a time, whichever processes the requests reach; the others wait, and are all served."""
    with group("--max-per-decode", "2", delay_s=0.05) as router, ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda _: router.ask("/v1/completions", b'{"prompt":"x"}'), range(64)))
        assert {status for status, _ in replies} == {200}
        with urllib.request.urlopen(f"http://127.0.0.1:{router.instances[1]}/", timeout=30) as answer:
            assert answer.read() == b"2"


def test_a_port_in_use_is_named() -> None:
    with group() as router:
        command = [sys.executable, "-m", "kvbaton.cli.main", "router", "--port", str(router.port), "--processes", "2"]
        second = subprocess.run(
            [*command, "--discovery-port", str(free_port())], capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == 2
        assert f"127.0.0.1:{router.port} cannot be bound" in second.stderr.replace("\n", " ")
