"""A peer that restarts on the same address is a new peer: it needs a new handshake, and nothing of its predecessor counts."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import msgspec
import pytest
from embedded_nodes import Node, false_source, hand_off, names, prompt_of
from served_instances import CLUSTER_KEY, Served, served_pair

from kvbaton.config import Trust
from kvbaton.core.handoff import Incarnation
from kvbaton.core.messages import Hello
from kvbaton.transport.faulty import Faults
from watching import wait_until

TRUST = Trust(CLUSTER_KEY.encode())


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Served, Served]]:
    with served_pair() as (source, target):
        yield source, target


def assert_works(pair: tuple[Served, Served], prompt: str) -> None:
    source, target = pair
    reply = target.decode(prompt, source.prefill(prompt, f"works: {prompt}"))
    assert reply.status == 200, reply.content
    assert reply.text == source.client.complete(prompt).text


def restart(instance: Served) -> None:
    """Kill an instance and start it again, with the same command on the same ports."""
    instance.signal(signal.SIGKILL)
    assert instance.wait_for_end().returncode == -signal.SIGKILL
    instance.start()


class TestPeerRestart:
    """The survivor is not restarted, fails what it had with the old incarnation at once, and serves the next request."""

    def test_a_source_that_comes_back(self, pair: tuple[Served, Served]) -> None:
        source, target = pair
        assert_works(pair, "before the source came back")
        old = source.prefill("Hello", "held by the old one")
        restart(source)
        reply = target.decode("Hello", old)
        assert reply.status == 502
        assert "of the peer is dead" in reply.error or f"{old['remote_engine_id']} is gone" in reply.error
        target.wait_idle()
        assert_works(pair, "after the source came back")
        source.wait_idle()

    def test_a_target_that_comes_back(self, pair: tuple[Served, Served]) -> None:
        source, target = pair
        assert_works(pair, "before the target came back")
        held = source.prefill("Hello", "for whichever target comes")
        restart(target)
        assert target.decode("Hello", held).status == 200
        assert_works(pair, "after the target came back")
        for instance in pair:
            instance.wait_idle()
            assert instance.complaints() == []


class TestSourceKilledInMidCopy:
    """A source that dies in the middle of a copy: its hand-offs fail in about a second, and its successor is taken as it is."""

    def test_killed_in_the_middle_and_started_again(self, pair: tuple[Served, Served]) -> None:
        source, _ = pair
        prompt, name = prompt_of(1), next(names)
        with Node(trust=TRUST, faults=Faults(stall=True)) as target:
            source.client.complete(
                list(prompt), max_tokens=1, kv_transfer_params={"do_remote_decode": True, "transfer_id": name}
            )
            request = target.decode(name, prompt, source.control)
            wait_until(lambda: target.transport._posted != {}, "the copy is under way")
            pid = source.pid
            restart(source)
            error = request.wait().error
            assert f"process {pid} of the peer is dead" in error or "was replaced by" in error
            target.wait_idle()
            target.transport.set_faults(Faults())
            name = next(names)
            params = {"do_remote_decode": True, "transfer_id": name}
            assert source.client.complete(list(prompt), max_tokens=1, kv_transfer_params=params).status == 200
            answer = target.decode(name, prompt, source.control).wait()
            assert answer.tokens == target.alone(prompt).wait().tokens
            source.wait_idle()
            target.wait_idle()

    @pytest.mark.parametrize("is_numbered", [True, False], ids=["numbered", "of an earlier release"])
    def test_a_successor_that_starts_before_the_death_is_seen(self, is_numbered: bool) -> None:
        """Its card from the same address is enough once it answers what it was asked there; an earlier release's is at once."""
        with Node() as source, Node() as target, false_source(target, source, prompt_of(2)) as peer:
            peer.announce()
            before, peer.intruder.incarnation = peer.intruder.incarnation, Incarnation("its-successor")
            assert not peer.request.is_over
            peer.intruder.hang_up()
            peer.intruder.receive()
            hello = Hello(peer.intruder.card_like(source.card), wants_answer=False)
            if is_numbered:
                peer.intruder.send_message(msgspec.structs.replace(hello, answers=0), target.incarnation)
                asked = peer.intruder.receive_message(Hello).message
                assert isinstance(asked, Hello)
                assert asked.question > 1
                assert not peer.request.is_over, "the card alone may be late, and its process dead"
                hello = msgspec.structs.replace(hello, answers=asked.question)
            peer.intruder.send_message(hello, target.incarnation)
            assert f"incarnation {before} was replaced by its-successor" in peer.request.wait().error
            target.wait_idle()
            assert hand_off(source, target, prompt_of(3)).tokens == source.alone(prompt_of(3)).wait().tokens
