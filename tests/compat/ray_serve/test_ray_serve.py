"""kvbaton under a real Ray Serve on several Ray nodes: replicas come and go with the load, and no request is lost or wrong."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from system import Client, Reply, Up, blocks, stream_events

from kvbaton.deploy.ray import RaySettings, ReplicaSettings, application, register_connector
from kvbaton.engines.base import EngineOptions
from kvbaton.engines.embedded.plugin import EmbeddedServers
from kvbaton.engines.vllm.settings import parse_settings
from kvbaton.errors import ConfigError
from kvbaton.launch.fleet import Fleet
from kvbaton.launch.ports import PortPicker
from watching import is_running, wait_until

ray = pytest.importorskip("ray", reason="run by `make test-ray`")
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.timeout(2400)]

REQUESTS = 1000
CLIENTS = 12
WAIT_S = 600.0
"""Three instances of each kind start one after another: on two cores that others use, 240 s were too few."""
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
"""Ray replaces 127.0.0.1 by the address of the machine."""
APP = "kvbaton"
PROMPTS = [f"{number} is a prompt that is long enough to be handed over, {number}" for number in range(20)]
STREAM_TOKENS = 1500
QUICKLY = {"upscale_delay_s": 0.5, "downscale_delay_s": 1.0, "look_back_period_s": 2.0, "metrics_interval_s": 0.5}
SPREAD = {"max_replicas_per_node": 1, "ray_actor_options": {"num_cpus": 1}}
# A prompt of the tiny model is at its prefill instance for a few milliseconds.
PREFILL = ReplicaSettings(least=1, most=3, in_flight=0.2, autoscaling=QUICKLY, serve=SPREAD)
DECODE = ReplicaSettings(least=1, most=3, in_flight=3, autoscaling=QUICKLY, serve=SPREAD)
_PAGES = ("/page/chat.js", "/")
ONE = ReplicaSettings(serve={"ray_actor_options": {"num_cpus": 1}})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Three Ray nodes of this machine, each with an address of its own, and the port of Serve on the first."""
    nodes = Cluster()
    for host in HOSTS:
        nodes.add_node(node_ip_address=host, num_cpus=4, object_store_memory=80 << 20, include_dashboard=False)
    found = PortPicker().pick()
    try:
        ray.init(address=nodes.address, log_to_driver=False, _node_ip_address=HOSTS[0])
        # One proxy: those of three nodes would share this address, and one that is stopped closes what it has not accepted.
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": found})
        yield found
        serve.shutdown()
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What one instance answers to each prompt, and how its stream goes on."""
    with Fleet() as fleet:
        part = EmbeddedServers(EngineOptions("tiny", sharing=2)).part("single", "both", PortPicker())
        fleet.start(part)
        fleet.wait_healthy(WAIT_S)
        client = Client(int(part.base_url.rpartition(":")[2]))
        answers = {prompt: client.complete(prompt, max_tokens=4).text for prompt in PROMPTS}
        return answers | {"stream": client.complete(PROMPTS[0], max_tokens=STREAM_TOKENS).text}


class Served:
    """A running application, as its clients and its operators see it."""

    def __init__(self, port: int) -> None:
        self.client = Client(port)
        self.seen: Counter[tuple[int, int]] = Counter()
        self.listened: set[tuple[str, int]] = set()

    def live(self) -> list[dict[str, Any]]:
        """The live instances that the router lists; notes how many there were, and where they listen."""
        found: list[dict[str, Any]] = self.client.get("/instances").document["live"]
        self.listened |= {_address(each) for each in found}
        self.seen[self._counts(found)] += 1
        return found

    def wait_for(self, prefill: int, decode: int) -> None:
        """Wait until the router has so many instances."""
        wait_until(lambda: self._counts(self.live()) == (prefill, decode), f"{prefill} and {decode} instances", WAIT_S)

    def processes(self, *roles: str) -> list[int]:
        """The process of one replica of each deployment."""
        return [serve.get_deployment_handle(role, APP).process.remote().result(timeout_s=60)[1] for role in roles]

    @staticmethod
    def _counts(found: list[dict[str, Any]]) -> tuple[int, int]:
        by_type = Counter(str(each["type"]).lower()[0] for each in found)
        return by_type["p"], by_type["d"]


def _address(instance: dict[str, Any]) -> tuple[str, int]:
    host, _, port = instance["http_address"].rpartition(":")
    return host, int(port)


@contextmanager
def served(port: int, settings: RaySettings) -> Iterator[Served]:
    """An application that is deleted afterwards; nothing of it may be left."""
    serve.run(application(settings), name=APP)
    running = Served(port)
    try:
        running.wait_for(1, 1)
        left = running.processes("router", "prefill", "decode")
        yield running
    finally:
        # Serve's own wait ends after 60 s, and replicas may drain for as long; what is left of one test would fail the next.
        serve.delete(APP, _blocking=False)
        wait_until(lambda: APP not in serve.status().applications, "the application is deleted", WAIT_S)
    wait_until(lambda: not any(map(is_running, left)), "the processes of the last replicas have ended")
    assert [each for each in running.listened if _listens(*each)] == []


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


class Load:
    """Clients that ask without a pause, and streams that are long enough to be under way whenever a replica is stopped."""

    def __init__(self, client: Client, expected: dict[str, str]) -> None:
        self._client, self._expected = client, expected
        self._lock = threading.Lock()
        self.answered = self.streamed = 0
        self.lost: list[str] = []
        self.wrong: list[str] = []

    def run(self, clients: int, streams: int, is_done: Callable[[], bool]) -> None:
        """Ask until it is done, and what was asked is answered."""
        jobs = [self._ask] * clients + [self._stream] * streams
        threads = [threading.Thread(target=self._repeat, args=(job, is_done), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a request is not answered"

    def _repeat(self, job: Callable[[], None], is_done: Callable[[], bool]) -> None:
        while not is_done():
            try:
                job()
            except Exception as error:  # noqa: BLE001 - whatever a client may get is a lost request
                with self._lock:
                    self.lost.append(f"{type(error).__name__}: {error}")

    def _ask(self) -> None:
        prompt = PROMPTS[self.answered % len(PROMPTS)]
        self._check(self._client.complete(prompt, max_tokens=4), self._expected[prompt])

    def _check(self, reply: Reply, text: str) -> None:
        assert reply.status == 200, reply.content[:300]
        with self._lock:
            self.answered += 1
            if reply.text != text or not reply.document["kvbaton"]["handed_off"]:
                self.wrong.append(f"{reply.text!r}, {reply.document.get('kvbaton')}")

    def _stream(self) -> None:
        body = {"prompt": PROMPTS[0], "max_tokens": STREAM_TOKENS, "temperature": 0}
        with self._client.stream("/v1/completions", body) as response:
            assert response.status == 200, response.read(300)
            events = list(stream_events(response))
        assert events[-1:] == ["[DONE]"], f"a stream has ended after {len(events)} events: {events[-1:]}"
        found = [msgspec.json.decode(each) for each in events[:-1]]
        text = "".join(each["choices"][0]["text"] for each in found if each.get("choices"))
        with self._lock:
            self.streamed += 1
            if text != self._expected["stream"]:
                self.wrong.append(f"a stream: {text[:80]!r}")


def scale_up_and_down(running: Served, load: Load, requests: int) -> None:
    """Many clients until there were three instances of each kind, then one and two streams until there is one of each again."""

    def has_grown() -> bool:
        running.live()
        return all(max(counts[side] for counts in running.seen) == 3 for side in (0, 1)) and load.answered >= requests // 2

    def has_shrunk() -> bool:
        return len(running.live()) == 2 and load.answered >= requests

    for clients, streams, is_done in ((CLIENTS, 2, has_grown), (1, 2, has_shrunk)):
        stop = threading.Event()
        asking = threading.Thread(target=load.run, args=(clients, streams, stop.is_set), daemon=True)
        asking.start()
        try:
            wait_until(is_done, is_done.__name__, WAIT_S)
        finally:
            stop.set()
            asking.join(WAIT_S)
    assert {host for host, _ in running.listened} == set(HOSTS)


def test_no_request_is_lost_or_wrong_while_replicas_come_and_go(port: int, expected: dict[str, str]) -> None:
    with served(port, RaySettings("tiny", prefill=PREFILL, decode=DECODE)) as running:
        load = Load(running.client, expected)
        scale_up_and_down(running, load, REQUESTS)
        print(f"answered {load.answered}, streamed {load.streamed}, numbers of instances seen {dict(running.seen)}")
        assert load.answered >= REQUESTS
        assert load.streamed
        assert (load.lost, load.wrong) == ([], [])
        for each in running.live():
            wait_until(lambda each=each: blocks(*_address(each)[::-1])["held"] == 0, "no block is held")  # type: ignore[misc]


def test_the_same_load_notices_replicas_that_do_not_drain(port: int, expected: dict[str, str]) -> None:
    with served(port, RaySettings("tiny", prefill=PREFILL, decode=DECODE, drain_timeout_s=0.1)) as running:
        load = Load(running.client, expected)
        for _ in range(5):  # a replica that is stopped may have had nothing to do
            running.seen.clear()
            scale_up_and_down(running, load, 0)
            if load.lost or load.wrong:
                return
        pytest.fail("no request was lost, though replicas were stopped while they had some")


def test_the_same_load_notices_caches_that_do_not_arrive(port: int, expected: dict[str, str]) -> None:
    with served(port, RaySettings("tiny", options={"controls": {"drop_writes": True}})) as running:
        load = Load(running.client, expected)
        load.run(2, 0, lambda: load.answered >= len(PROMPTS))
        assert load.wrong


def test_what_dies_is_replaced(port: int, expected: dict[str, str]) -> None:
    """An instance; then the router, whose successor has another address, so that the instances are replaced too."""
    with served(port, RaySettings("tiny", prefill=ONE, decode=ONE)) as running:
        for role, replaced in (("decode", 1), ("router", 2)):
            before = {each["incarnation"] for each in running.live()}
            os.kill(running.processes(role)[0], signal.SIGKILL)

            def is_replaced(before: set[str] = before, replaced: int = replaced) -> bool:
                try:
                    now = {each["incarnation"] for each in running.live()}
                except (OSError, KeyError, msgspec.DecodeError, ValueError):
                    return False  # no router answers
                return len(now) == 2 and len(now - before) == replaced

            wait_until(is_replaced, f"another {role}", WAIT_S)
            reply = running.client.complete(PROMPTS[1], max_tokens=4)
            assert (reply.text, reply.document["kvbaton"]["handed_off"]) == (expected[PROMPTS[1]], True)


def test_rays_llm_stack_finds_the_connector_in_a_replica(port: int) -> None:
    register_connector()
    register_connector()  # a second application

    @ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
    def set_up(extra: dict[str, Any]) -> dict[str, Any]:
        from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

        config = {"kv_connector": "KVBatonConnector", "kv_connector_extra_config": extra}
        llm_config = SimpleNamespace(engine_kwargs={"kv_transfer_config": config})
        KVConnectorBackendFactory.create_backend("KVBatonConnector", llm_config).setup()
        return extra

    settings = [parse_settings(each) for each in ray.get([set_up.remote({"allow": ["10.0.0.0/8"]}) for _ in range(2)])]
    assert all(each.control_host in HOSTS and each.allow == ("10.0.0.0/8",) for each in settings)
    assert {(str(each.mode), each.transport) for each in settings} == {("pull", "tcp")}
    assert len({each.control_port for each in settings}) == 2
    with pytest.raises(ray.exceptions.RayTaskError, match="mode is 'push'") as caught:
        ray.get(set_up.remote({"mode": "push"}))
    assert isinstance(caught.value.cause, ConfigError)


def test_up_starts_the_same_on_a_cluster_of_its_own_and_leaves_nothing() -> None:
    # Not pytest's directory: the paths of Ray's sockets would be too long in it.
    with (
        tempfile.TemporaryDirectory(prefix="kvb") as temporary,
        Up("--ray", "--model", "tiny", temporary=Path(temporary), start_s=WAIT_S) as up,
    ):
        reply = up.client.complete(PROMPTS[0], max_tokens=4)
        assert (reply.status, reply.document["kvbaton"]["handed_off"]) == (200, True)
        # Serve's HTTP server writes the names of headers in small letters.
        script, page = ({name.title(): value for name, value in up.client.get(path).headers.items()} for path in _PAGES)
        assert script["Content-Type"].startswith("text/javascript")
        assert "Content-Security-Policy" in page
        children = up.children()
        up.process.send_signal(signal.SIGINT)
        assert up.wait(WAIT_S) == 0, up.output
        wait_until(lambda: not any(map(is_running, children)), "all processes have ended", WAIT_S)
