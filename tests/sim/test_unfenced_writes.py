"""What `--unfenced-writes` takes away, and what it leaves: shipped writers, beside readers under the same faults."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from kvbaton.core.handoff import Mode
from kvbaton.sim.run import LIMITS, UNFENCED_RULES, Run, run_script
from kvbaton.sim.script import Fault, FaultKind, RequestScript, Script
from kvbaton.sim.world import RULES
from kvbaton.transport.base import LateWrites

RUNS = 40


def _script(seed: int, *faults: Fault, one_host: bool = False) -> Script:
    """Requests that follow each other into few blocks, so that a block has another owner soon."""
    requests = tuple(
        RequestScript(0.2 * number, 0, 0, tokens=4, chunk=2, mode=Mode.PUSH, retries=1, retry_after_s=0.05)
        for number in range(6)
    )
    return Script(
        seed=seed,
        late_writes=LateWrites.UNFENCED,
        unfenced_writes=True,
        library_writes=True,
        one_host=one_host,
        ranks=2,
        layers=2,
        prefills=1,
        decodes=1,
        prefill_blocks=24,
        decode_blocks=5,
        requests=requests,
        faults=faults,
        move_s=0.02,
        decode_s=0.1,
        step_s=0.02,
        rank_lag_s=0.01,
    )


FAULTS = {
    "a failed write lands later": lambda at_s: (Fault(FaultKind.COPY_FAILS, at_s, who="p0", number=0),),
    "a rank outlives its leader": lambda at_s: (Fault(FaultKind.CRASH, at_s, who="p0", for_s=0.5),),
    "another process has its address": lambda at_s: (Fault(FaultKind.RESTART, at_s, who="p0"),),
}
"""What the libraries do, and nothing takes back."""

ELSEWHERE = {"another process has its address": {"one_host": False, "move_s": 0.2}}
"""On one host the death of a leader is seen. Elsewhere its successor at the address counts as that, a little later."""


def _play(name: str, *, writes: bool) -> Counter[str]:
    """Which rules did not hold over some runs with a fault at different times."""
    broken: Counter[str] = Counter()
    for seed in range(RUNS):
        script = _script(seed, *FAULTS[name](0.03 + 0.01 * seed), one_host=True)
        script = msgspec.structs.replace(script, unfenced_writes=writes, **ELSEWHERE.get(name, {}))
        result = run_script(script)
        assert not result.violations, "everything else holds: every request ends, once, and every block is back"
        broken += result.broken_unpromised
    return broken


@pytest.mark.parametrize("name", FAULTS)
def test_with_unfenced_writes_a_late_byte_lands_in_a_block_of_another_request(name: str) -> None:
    """So the option is not among the promises, and this shows why."""
    assert _play(name, writes=True)["epoch"]


@pytest.mark.parametrize("name", FAULTS)
def test_without_them_the_same_faults_break_nothing(name: str) -> None:
    assert not _play(name, writes=False)


def test_blocks_that_a_silent_source_may_write_to_come_back_when_it_answers_and_not_before() -> None:
    """Nothing fences a shipped writer: its blocks wait for longer than every means of fencing is given."""
    cut = Fault(FaultKind.CUT, 0.05, who="d0", other="p0", for_s=5.0)
    run = Run(_script(1, cut, Fault(FaultKind.CANCEL_TARGET, 0.06, number=0)))
    target = run.cluster.instances["d0"].coordinator.target
    waiting: list[int] = []
    for at_s in (0.05, 4.9):
        run.world.at(at_s, None, lambda: waiting.append(target.quarantined_blocks))
    assert not run.run().violations
    assert waiting[0] == 0 < waiting[1]
    assert 0.06 + 3 * LIMITS.stop_timeout < 4.9
    assert target.quarantined_blocks == 0


def test_what_is_not_promised_is_a_rule_and_concerns_bytes_alone() -> None:
    """Liveness, outcomes and the conservation of blocks are promised whatever writes."""
    assert set(RULES) >= UNFENCED_RULES
    kept = {"everything ends", "every block is back", "hard end", "one outcome", "legal pair", "blocks conserved", "heals"}
    assert not UNFENCED_RULES & kept
