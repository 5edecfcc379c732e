"""Router, prefill and decode on hosts of their own, 10 ms apart: `kvbaton verify` is green across them, and its control red."""

from __future__ import annotations

import json
import subprocess
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


class Deployment:
    """A router, a prefill and a decode instance on three hosts, and a single instance here."""

    def __init__(self, fleet: Fleet, switch: Switch, machines: list[Host], is_ipv6: bool) -> None:
        self.switch = switch
        self._fleet, self._ports, self._key = fleet, PortPicker(), new_cluster_key()
        self._here, self._router, self._prefill, self._decode = machines
        self._is_ipv6 = is_ipv6
        self.router_url = self.single_url = ""

    def start(self, mode: str, *, advertises: bool = True, control: bool = False) -> None:
        """Start all of it. Without `advertises`, instances listen on every address, and find out which one others reach."""
        port, discovery = self._ports.pick(), self._ports.pick()
        at = self._router.address(self._is_ipv6)
        command = kvbaton_command("router", "--host", at, "--port", str(port), "--discovery-host", at)
        command += ["--discovery-port", str(discovery), "--show-details"]
        self.router_url = f"http://{in_url(at)}:{port}"
        self._begin("router", self._router, command, f"{self.router_url}/instances")
        for name, host in (("prefill", self._prefill), ("decode", self._decode)):
            more = ["--router", f"{in_url(at)}:{discovery}", "--mode", mode, "--transport", "tcp", "--poison"]
            self._serve(name, name, host, advertises, *more, *["--drop-writes"] * control)
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
    with hosts(3) as (switch, machines), Fleet() as fleet:
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
