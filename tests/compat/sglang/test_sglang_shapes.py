"""Unequal tensor parallelism on real SGLang: every answer is that of one server with one rank.

MLA is tested on SGLang's own pool (`inside/class_checks.py`), and cut into ranks without servers.
"""

from __future__ import annotations

import aiohttp
import pytest
from sglang_stand import StandSpec, different, prompt, stand
from test_sglang_pair import run

pytestmark = [pytest.mark.sglang_full, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("drop_writes", [False, True], ids=["handed over", "control"])
@pytest.mark.parametrize(("prefill", "decode"), [("tp2", "tp1"), ("tp1", "tp2")])
def test_ranks_of_two_instances_may_differ(prefill: str, decode: str, drop_writes: bool) -> None:
    spec = StandSpec(prefill_shape=prefill, decode_shape=decode, drop_writes=drop_writes)
    with stand(spec) as pair:

        async def work(session: aiohttp.ClientSession) -> None:
            equal = 0
            for seed in range(6):
                ids = prompt(seed, 100)
                single = await pair.generate(session, pair.single.base_url, ids)
                equal += not different(single, (await pair.pair(session, ids))[1])
            assert equal == (0 if drop_writes else 6)

        run(work)
