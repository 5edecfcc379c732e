"""kvbaton's own instances behind vLLM's toy proxy for MoRI-IO, which skips registrations without `dp_size` and `tp_size`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from system import Client, Stand
from vllm_toy_proxy import has_registered, toy_proxy_part

from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import Mode
from kvbaton.launch.fleet import Fleet
from watching import wait_until

pytestmark = [pytest.mark.vllm_full, pytest.mark.timeout(900)]

_START_S = 120.0
_ALLOW = ("--allow", "127.0.0.0/8")
"""The proxy sends no token of the cluster key, so the operator has to name the hosts that its requests may."""
_REQUESTS = 12


class _ToyStand(Stand):
    """The toy proxy instead of our router."""

    def __enter__(self) -> _ToyStand:
        fleet = self.fleets["toy-proxy"] = Fleet(lambda part, line: self.lines.append(f"{part} | {line}"))
        fleet.start(toy_proxy_part(self.router_port, self.discovery_port))
        fleet.wait_healthy(_START_S)
        return self

    def log(self) -> str:
        return "\n".join(line for line in list(self.lines) if line.startswith("toy-proxy | "))


def _body(index: int) -> dict[str, object]:
    words = f"Story {index}: " + "the river ran on and on " * (1 + 5 * (index % 4))
    return {"model": "tiny", "prompt": words, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("mode", list(Mode))
def test_kvbaton_instances_answer_behind_the_toy_proxy(mode: Mode) -> None:
    handoff = HandoffSettings(mode=mode)
    with _ToyStand() as stand:
        alone = Client(stand.start("single", "both"))
        prefill, decode = (
            stand.start(role, role, "tiny", "--poison", *_ALLOW, handoff=handoff) for role in ("prefill", "decode")
        )
        wait_until(lambda: has_registered(stand.log()), f"both to register\n{stand.log()}", 60)
        with ThreadPoolExecutor(4) as pool:
            # The proxy takes a token off the limit of a client.
            got = list(
                pool.map(lambda index: stand.client.post("/v1/completions", _body(index) | {"max_tokens": 9}), range(_REQUESTS))
            )
        assert [reply.status for reply in got] == [200] * _REQUESTS, [reply.content for reply in got] + [stand.log()]
        right = [alone.post("/v1/completions", _body(index) | {"max_tokens": 8}).text for index in range(_REQUESTS)]
        assert [reply.text for reply in got] == right
        for port in (prefill, decode):
            metrics = Client(port).get("/metrics").content.decode()
            delivered = [line for line in metrics.splitlines() if "kvbaton_handoffs_total{" in line and '"delivered"' in line]
            assert sum(float(line.rpartition(" ")[2]) for line in delivered) == _REQUESTS, metrics
        control = stand.log()
        assert "missing required keys" not in control
