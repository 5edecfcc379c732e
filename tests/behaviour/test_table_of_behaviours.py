"""Behaviours and bad inputs that connectors for vLLM and SGLang were seen to get wrong, on embedded instances.

What is right is in the docstring of each test. Behaviours that depend on every interleaving are tested in `tests/sim/`, layouts
and topologies in `tests/unit/core/`, prefix hits, chunks and preemption in `tests/unit/engines/embedded/`.

| module | behaviour |
|---|---|
| `test_abort_at_prefill.py` | an abort at the prefill side reaches decode without a timeout |
| `test_bad_announcements.py` | block lists, spans and aux records that make no sense |
| `test_control_frames.py` | frames that are no messages, and messages in the wrong state |
| `test_corrupt_transfers.py` | a corrupt byte in transit |
| `test_fenced_writers.py` | a writing source that wakes up late or was killed changes no byte of freed blocks |
| `test_hostile_bodies.py` | bodies that would take memory or time: long, wide and deep ones, by the megabyte |
| `test_hostile_inputs.py` | bad bodies, sources that never answer, garbage on the control port, no traffic at all |
| `test_http_key.py` | without the cluster key, HTTP clients list, release and start no hand-off, and have no host dialled |
| `test_idle_instances.py` | held blocks expire without traffic, and an idle instance does nothing |
| `test_many_handoffs.py` | back-pressure, errors of a post, a thousand hand-offs over fifty peers |
| `test_peer_restarts.py` | a peer restarts on the same address, or is killed in the middle of a copy |
| `test_refused_by_prefill.py` | what prefill refuses, decode does not wait for |
| `test_shutdown_with_handoffs.py` | role `both`, and shutdown with hand-offs in flight |
| `test_transfer_events.py` | source data that is not ready |
| `test_unresponsive_sources.py` | dead, black-holed, silent and slow sources |
| `test_watched_deployment.py` | whether caches are handed over, board and alert rules, against a running deployment |
"""

from __future__ import annotations

import ast
import re
from pathlib import Path


def test_every_module_is_in_the_table() -> None:
    text = ast.get_docstring(ast.parse(Path(__file__).read_text())) or ""
    modules = {path.name for path in Path(__file__).parent.glob("test_*.py")} - {Path(__file__).name}
    assert set(re.findall(r"^\| `(\w+\.py)` \|", text, re.MULTILINE)) == modules
