"""Instances of role `both`, and instances that are stopped while hand-offs are under way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

import pytest
from driver_rig import Intruder
from embedded_nodes import Node, names, prompt_of
from served_instances import CLUSTER_KEY, Served

from kvbaton.config import Trust
from kvbaton.core.handoff import Outcome
from kvbaton.core.messages import Grant, Hello, Stop
from kvbaton.launch.ports import check_port_free
from kvbaton.transport.faulty import Faults
from watching import wait_until

TRUST = Trust(CLUSTER_KEY.encode())


@pytest.fixture(scope="module")
def instances() -> Iterator[tuple[Served, Served]]:
    with Served("both") as one, Served("both") as other:
        yield one, other


def ask(instance: Served, prompt: str, params: object) -> int:
    """The status of an answer; 0 when the instance hangs up without one."""
    try:
        return instance.decode(prompt, params).status
    except (OSError, HTTPException):
        return 0


class TestBothRolesAndShutdown:
    """Role `both` serves clients and takes part in hand-offs on either side. A stopped instance ends in order."""

    def test_both_serves_plain_requests(self, instances: tuple[Served, Served]) -> None:
        one, other = instances
        assert one.client.complete("Hello").text == other.client.complete("Hello").text

    @pytest.mark.parametrize("first", [0, 1])
    def test_both_hands_off_either_way(self, instances: tuple[Served, Served], first: int) -> None:
        source, target = instances[first], instances[1 - first]
        prompt = f"from {first} to {1 - first}"
        reply = target.decode(prompt, source.prefill(prompt, prompt))
        assert reply.document["kvbaton"]["handed_off"] is True
        assert reply.text == source.client.complete(prompt).text
        for instance in instances:
            instance.wait_idle()

    def test_a_source_that_is_stopped_notifies_its_targets(self, instances: tuple[Served, Served]) -> None:
        """The target's timeout is 30 s; the reason shows that it was notified."""
        source, _ = instances
        with Node(trust=TRUST, faults=Faults(stall=True)) as target:
            requests = []
            for seed in range(5):
                name, prompt = next(names), prompt_of(seed)
                params = {"do_remote_decode": True, "transfer_id": name}
                assert source.client.complete(list(prompt), max_tokens=1, kv_transfer_params=params).status == 200
                requests.append(target.decode(name, prompt, source.control))
            wait_until(lambda: len(target.transport._posted) == len(requests), "all copies are under way")
            source.signal(signal.SIGTERM)
            for request in requests:
                assert "the source cancelled" in request.wait().error
            assert source.wait_for_end().returncode == 0
            source.check_ports_free()
            assert source.complaints() == []
            target.wait_idle()

    def test_a_target_that_is_stopped_notifies_its_sources(self) -> None:
        with Served("both") as target, Intruder(CLUSTER_KEY.encode()) as source, Node(trust=TRUST) as like:
            source.listen()
            params = {"do_remote_prefill": True, "transfer_id": "in flight"}
            address = {"remote_host": "127.0.0.1", "remote_port": source.address.handshake}
            with ThreadPoolExecutor(1) as pool:
                status = pool.submit(ask, target, "Hello", params | address)
                source.receive_message(Hello)
                source.send_message(Hello(source.card_like(like.card), wants_answer=False))
                grant = source.receive_message(Grant).message
                target.signal(signal.SIGTERM)
                stop = source.receive_message(Stop).message
                assert isinstance(grant, Grant)
                assert isinstance(stop, Stop)
                assert (stop.key, stop.grant, stop.outcome) == (grant.key, grant.grant, Outcome.CANCELLED)
                assert status.result(20) in (0, 503)
            assert target.wait_for_end().returncode == 0
            target.check_ports_free()
            assert target.complaints() == []


class TestNothingIsLeft:
    """After the end no thread is left, no peer reaches the memory any more, and what was in flight has failed with a reason."""

    @pytest.mark.parametrize("transport", ["local", "tcp"])
    @pytest.mark.parametrize("first", ["source", "target"])
    def test_everything_ends(self, transport: str, first: str) -> None:
        threads = set(threading.enumerate())
        source = Node(transport=transport)
        target = Node(transport=transport, faults=Faults(stall=True))
        with source, target:
            requests = []
            for seed in range(3):
                name, prompt = next(names), prompt_of(seed)
                source.prefill(name, prompt).wait()
                requests.append(target.decode(name, prompt, source.address))
            wait_until(lambda: len(target.transport._posted) == len(requests), "all copies are under way")
            ended = source if first == "source" else target
            ended.engine.close()
            ended.driver.close()
            for request in requests:
                error = request.wait().error
                assert "the source cancelled" in error if first == "source" else error == "the engine is stopping"
            other = target if first == "source" else source
            other.wait_idle()
            self.check_unreachable(ended)
        assert set(threading.enumerate()) <= threads

    def check_unreachable(self, node: Node) -> None:
        """Its control port, and its data port where it has one, are free again."""
        check_port_free("127.0.0.1", node.address.handshake, "--control-port")
        (endpoint,) = node.card.ranks[0].endpoints
        if endpoint.transport == "tcp":
            check_port_free("127.0.0.1", int(endpoint.details["port"]), "--port")
