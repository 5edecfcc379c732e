"""Router, prefill and decode on hosts of their own, 10 ms apart: `kvbaton verify` is green across them, and its control red."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hosts import Host, Switch, can_have_two_hosts, hosts

from kvbaton.config import CLUSTER_KEY_VARIABLE
from kvbaton.core.addresses import in_url
from kvbaton.launch.fleet import Fleet, FleetPart, core_share
from kvbaton.launch.local import kvbaton_command, new_cluster_key
from kvbaton.launch.ports import PortPicker
from watching import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not can_have_two_hosts(), reason="needs root, ip, tc and /dev/net/tun"),
]

_START_S = 120.0
_VERIFY_S = 300.0
_REQUESTS = 6
_CUT_S = 5.0


class Deployment:
    """A router, a prefill and a decode instance on three hosts, a single instance here, and a host to spare."""

    def __init__(self, fleet: Fleet, switch: Switch, machines: list[Host], is_ipv6: bool) -> None:
        self.switch = switch
        self._fleet, self._ports, self._key = fleet, PortPicker(), new_cluster_key()
        self._here, self._router, self._prefill, self._decode, self._spare = machines
        self._is_ipv6 = is_ipv6
        self.router_url = self.single_url = ""
        self.instance_urls: list[str] = []

    def start(self, mode: str, *limits: str, advertises: bool = True, control: bool = False) -> None:
        """Start all of it. Without `advertises`, instances listen on every address, and find out which one others reach."""
        port, discovery = self._ports.pick(), self._ports.pick()
        at = self._router.address(self._is_ipv6)
        self._router_command = kvbaton_command("router", "--host", at, "--port", str(port), "--discovery-host", at)
        self._router_command += ["--discovery-port", str(discovery), "--show-details"]
        self.router_url = f"http://{in_url(at)}:{port}"
        self._begin("router", self._router, self._router_command, f"{self.router_url}/instances")
        for name, host in (("prefill", self._prefill), ("decode", self._decode)):
            more = ["--router", f"{in_url(at)}:{discovery}", "--mode", mode, "--transport", "tcp", "--poison"]
            url = self._serve(name, name, host, advertises, *more, *limits, *["--drop-writes"] * control)
            self.instance_urls.append(url)
        self.single_url = self._serve("single", "both", self._here, True)
        self._fleet.wait_healthy(_START_S)
        wait_until(lambda: len(self.addresses()) == 2, "both instances register", _START_S)

    def verify(self) -> tuple[int, dict[str, Any]]:
        """Compare the two, from here."""
        command = kvbaton_command("verify", "--model", "tiny", "--requests", str(_REQUESTS), "--longest-prompt", "200")
        command += ["--pair-url", self.router_url, "--single-url", self.single_url, "--max-tokens", "6", "--json"]
        run = subprocess.run(command, capture_output=True, text=True, timeout=_VERIFY_S, check=False)
        assert run.stdout, run.stderr
        return run.returncode, json.loads(run.stdout)

    def cut(self) -> None:
        """Separate prefill and decode; the router reaches both."""
        self.switch.separate(self._prefill, self._decode)

    def move_router(self) -> None:
        """The host of the router falls silent; another host takes its address over, and starts a router there."""
        for host in (self._here, self._prefill, self._decode):
            self.switch.separate(self._router, host)
        self.switch.move(self._router.ipv4, self._router, self._spare)
        self._begin("moved-router", self._spare, self._router_command, f"{self.router_url}/instances")
        wait_until(lambda: self._fleet.is_healthy("moved-router"), "the router answers from its new host", _START_S)

    def complete(self, prompt: str) -> tuple[int, str]:
        """Status and text of one completion of the pair."""
        body = json.dumps({"prompt": prompt, "max_tokens": 6, "temperature": 0}).encode()
        request = urllib.request.Request(f"{self.router_url}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_START_S) as answer:
                return answer.status, json.load(answer)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def held_blocks(self) -> list[int]:
        """Blocks that the prefill and the decode instance do not have free."""
        found = []
        for url in self.instance_urls:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                counts = dict(re.findall(r'^kvbaton_blocks\{state="(\w+)"\} (\S+)$', answer.read().decode(), re.MULTILINE))
            found.append(sum(int(float(count)) for state, count in counts.items() if state not in ("free", "cached")))
        return found

    def addresses(self) -> set[str]:
        """The hosts under which the router knows the instances."""
        with urllib.request.urlopen(f"{self.router_url}/instances", timeout=10) as answer:
            document = json.load(answer)
        return {each["http_address"].rpartition(":")[0].strip("[]") for each in document["live"]}

    def _serve(self, name: str, role: str, host: Host, advertises: bool, *more: str) -> str:
        own, port = host.address(self._is_ipv6), self._ports.pick()
        anywhere = "::" if self._is_ipv6 else "0.0.0.0"  # noqa: S104
        command = kvbaton_command("serve", "--role", role, "--model", "tiny", "--host", own if advertises else anywhere)
        command += ["--port", str(port), "--control-port", str(self._ports.pick()), *more]
        url = f"http://{in_url(own)}:{port}"
        self._begin(name, host, command, f"{url}/health")
        return url

    def _begin(self, name: str, host: Host, command: list[str], health_url: str) -> None:
        environment = core_share(4) | {CLUSTER_KEY_VARIABLE: self._key}
        self._fleet.start(FleetPart(name, host.command(*command), health_url, environment))


@contextmanager
def deployment(is_ipv6: bool = False, delay_s: float = 0.01) -> Iterator[Deployment]:
    with hosts(4) as (switch, machines), Fleet() as fleet:
        made = Deployment(fleet, switch, machines, is_ipv6)
        switch.delay_s = delay_s
        yield made


@pytest.mark.sampled(1, group="several hosts")
@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("is_ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_every_answer_is_the_same_across_three_hosts(mode: str, is_ipv6: bool) -> None:
    with deployment(is_ipv6) as made:
        made.start(mode)
        carried = made.switch.carried_total
        code, document = made.verify()
        assert (code, document["problems"]) == (0, [])
        assert (document["equal"], document["handed_off"], document["recomputed"]) == (_REQUESTS, _REQUESTS, 0)
        assert document["bytes_moved"] == document["bytes_planned"] > 0
        assert made.switch.carried_total > carried


@pytest.mark.sampled(1, group="several hosts")
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_the_control_that_moves_nothing_is_noticed_across_three_hosts(mode: str) -> None:
    with deployment() as made:
        made.start(mode, control=True)
        code, document = made.verify()
        assert code == 1
        assert document["different"] > 0


@pytest.mark.sampled(1, group="several hosts")
@pytest.mark.parametrize("is_ipv6", [False, True], ids=["IPv4", "IPv6"])
def test_instances_that_listen_on_every_address_find_the_one_that_others_reach(is_ipv6: bool) -> None:
    with deployment(is_ipv6) as made:
        made.start("pull", advertises=False)
        expected = {host.address(is_ipv6) for host in (made._prefill, made._decode)}
        assert made.addresses() == expected
        code, document = made.verify()
        assert (code, document["problems"]) == (0, [])


@pytest.mark.sampled(1, group="several hosts")
@pytest.mark.parametrize(("delay_s", "loss"), [(0.001, 0.0), (0.05, 0.0), (0.01, 0.01)], ids=["1 ms", "50 ms", "1 % loss"])
def test_every_answer_is_the_same_over_other_links(delay_s: float, loss: float) -> None:
    with deployment(delay_s=delay_s) as made:
        made.start("push")
        made.switch.loss = loss
        code, document = made.verify()
        assert (code, document["problems"]) == (0, [])
        assert document["handed_off"] == _REQUESTS


@pytest.mark.sampled(1, group="several hosts")
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_cut_of_five_seconds_loses_no_request(mode: str) -> None:
    with deployment() as made:
        made.start(mode)
        prompts = [f"{number} is asked while nothing crosses from prefill to decode" for number in range(4)]
        answers: dict[str, tuple[int, str]] = {}
        asked = [
            threading.Thread(target=lambda prompt=prompt: answers.update({prompt: made.complete(prompt)}), daemon=True)
            for prompt in prompts
        ]
        made.complete("the two instances know each other")
        made.cut()
        cut_at = time.monotonic()
        for thread in asked:
            thread.start()
        wait_until(lambda: time.monotonic() > cut_at + _CUT_S, "the cut has lasted", 2 * _CUT_S)
        assert not answers, "an answer came although nothing could be handed over"
        assert made.switch.stopped_total > 0
        made.switch.join()
        for thread in asked:
            thread.join(_START_S)
        assert {prompt: made.complete(prompt) for prompt in prompts} == answers
        assert {status for status, _ in answers.values()} == {200}
        code, document = made.verify()
        assert (code, document["problems"], document["handed_off"]) == (0, [], _REQUESTS)


@pytest.mark.sampled(1, group="several hosts")
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_a_cut_longer_than_every_deadline_ends_the_request_and_frees_both_sides(mode: str) -> None:
    with deployment() as made:
        made.start(mode, "--transfer-timeout", "3", "--defer-timeout", "5", "--stop-timeout", "1", "--retry", "0.5")
        assert made.complete("the two instances know each other")[0] == 200
        made.cut()
        status, message = made.complete("nothing crosses from prefill to decode")
        assert status in (502, 503, 504), message
        wait_until(lambda: made.held_blocks() == [0, 0], "both sides have freed their blocks while the link is cut", _START_S)
        made.switch.join()
        wait_until(lambda: made.complete("the link is back")[0] == 200, "requests are served again", _START_S)
        code, document = made.verify()
        assert (code, document["problems"], document["handed_off"]) == (0, [], _REQUESTS)


@pytest.mark.sampled(1, group="several hosts")
def test_a_router_that_moves_to_another_host_gets_its_instances_back() -> None:
    with deployment() as made:
        made.start("push")
        made.move_router()
        wait_until(lambda: len(made.addresses()) == 2, "both instances register with the router that took over", _START_S)
        code, document = made.verify()
        assert (code, document["problems"], document["handed_off"]) == (0, [], _REQUESTS)
