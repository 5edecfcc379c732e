"""Unequal ranks on real SGLang, with grouped heads and with MLA: every answer is that of one plain server.

The control is the same requests with decode servers that move no bytes: it must find every answer different.
"""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp
import pytest
from sglang_forked import ForkedServers
from sglang_stand import START_S, Answer, Grid, different, generate, hand_over, prompt, run

from kvbaton.engines.base import Controls
from kvbaton.launch.fleet import FleetPart

pytestmark = [pytest.mark.sglang_full, pytest.mark.timeout(1800)]

PROMPTS = [prompt(seed, tokens) for seed, tokens in enumerate((1, 17, 100, 100, 300))]
PAIRS = {
    "tp": (("tp1", "tp2"), ("tp2", "tp1")),
    "pp": (("pp2", "tp1"), ("pp2", "tp2")),
    "decode pp": (("tp1", "pp2"), ("pp2", "pp2")),
    "shared by ranks of prefill": (("tp4", "tp2"), ("tp4", "tp1")),
    "shared by ranks of decode": (("tp2", "tp4"), ("tp1", "tp4")),
    "three to two": (("tp3", "tp2"),),
    "equal and unequal": (("tp1", "tp1"), ("tp1", "tp2")),
}
"""Shapes of prefill and decode. The model `gqa` has two heads: of four ranks, two have the same one."""
_SHARED = {"KVBATON_TEST_SHARES_HEADS": "1"}
"""Ranks share heads as on GPUs."""


async def _different(
    session: aiohttp.ClientSession, prefill: FleetPart, decode: FleetPart, expected: Sequence[Answer]
) -> list[str]:
    found = []
    for ids, single in zip(PROMPTS, expected, strict=True):
        _, decoded = await hand_over(session, prefill, decode, ids)
        found.append(different(single, decoded))
    return found


# SGLang itself refuses a pipeline of the model with MLA.
@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        ("tp", "gqa"),
        ("tp", "mla"),
        ("pp", "gqa"),
        ("decode pp", "gqa"),
        ("shared by ranks of prefill", "gqa"),
        ("shared by ranks of decode", "gqa"),
        ("three to two", "gqa6"),
        ("equal and unequal", "window"),
    ],
)
def test_ranks_of_two_instances_may_differ(kind: str, ranks: str) -> None:
    grid, pairs = Grid(kind), PAIRS[ranks]
    with grid.fleet:
        single = grid.start("single", "both")
        prefills = {
            shape: grid.start(f"prefill-{shape}", "prefill", shape, variables=_SHARED)
            for shape in {shape for shape, _ in pairs}
        }
        expected: list[Answer] = []

        async def ask_single(session: aiohttp.ClientSession) -> None:
            expected.extend([await generate(session, single.base_url, ids) for ids in PROMPTS])

        for drops in (False, True):
            found: list[list[str]] = []
            with ForkedServers() as fleet:
                controls = Controls(poison=True, drop_writes=drops)
                shapes = {shape for _, shape in pairs}
                decodes = {
                    shape: grid.start(f"decode-{shape}", "decode", shape, fleet, controls=controls, variables=_SHARED)
                    for shape in shapes
                }
                grid.wait_healthy()
                fleet.wait_healthy(START_S)
                if not expected:
                    run(ask_single)

                async def ask_pairs(session: aiohttp.ClientSession) -> None:
                    for shape, other in pairs:
                        found.append(await _different(session, prefills[shape], decodes[other], expected))  # noqa: B023

                run(ask_pairs)
            assert [[bool(each) for each in of_pair] for of_pair in found] == [[drops] * len(PROMPTS)] * len(pairs), found


def test_ranks_with_heads_that_sglang_has_added_are_refused_by_name() -> None:
    """On CPUs SGLang adds heads of zeros where there are more ranks than heads; a peer that has none cannot take them."""
    grid = Grid()
    with grid.fleet:
        prefill, decode = grid.start("prefill", "prefill", "tp4"), grid.start("decode", "decode", "tp2")
        grid.wait_healthy()

        async def work(session: aiohttp.ClientSession) -> None:
            for answer in await hand_over(session, prefill, decode, PROMPTS[1]):
                assert answer.status == 500
                assert "incompatible peer" in answer.text
                assert "total_heads" in answer.text

        run(work)
        assert grid.is_alive(prefill)
        assert grid.is_alive(decode)


def test_data_parallel_ranks_of_prefill_hand_over_the_rooms_that_are_theirs() -> None:
    """Two copies of a prefill behind one HTTP port; SGLang sends each request to the one that its room names."""
    grid = Grid()
    bootstrap_port, handoffs_port = grid.ports.pick(2), grid.ports.pick(2)
    listens = ("--disaggregation-bootstrap-port", str(bootstrap_port))
    with grid.fleet:
        single = grid.start("single", "both")
        prefill = grid.start("prefill", "prefill", "dp2", arguments=listens, settings={"handoffs_port": handoffs_port})
        decode = grid.start("decode", "decode", settings={"prefill_dp_size": 2})
        grid.wait_healthy()

        async def work(session: aiohttp.ClientSession) -> None:
            for room, ids in enumerate(PROMPTS, 1000):
                expected = await generate(session, single.base_url, ids)
                _, decoded = await hand_over(session, prefill, decode, ids, room=room, bootstrap_port=bootstrap_port)
                assert different(expected, decoded) == "", f"room {room}"

        run(work)
