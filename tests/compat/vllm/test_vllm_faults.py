"""Clients that leave at a stage of the hand-off, on the servers that all tests share; a sample that changes with the commit.

`test_vllm_full_faults.py` has the rest: stages that need a full cache or an expired lease, and signals to either side.
"""

from __future__ import annotations

import aiohttp
import pytest
from vllm_handing import Client
from vllm_leaving import LEAVE_CASES_ANYWHERE, LeaveCase, leave
from vllm_stand import VllmStand, together

pytest_plugins = ["vllm_fixtures"]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", LEAVE_CASES_ANYWHERE, ids=str)
def test_a_client_that_leaves_frees_both_sides(standing: VllmStand, case: LeaveCase) -> None:
    async def send(session: aiohttp.ClientSession) -> None:
        await leave(Client(session, standing.pair), case)

    together(send)
