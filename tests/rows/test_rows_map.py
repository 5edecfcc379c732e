"""Must-work behaviours and bad inputs, on embedded instances: each row of the two lists has a test that names it.

One list holds what connectors for vLLM were seen to need or get wrong, the other what SGLang's disaggregation was. "Right" is
said in the docstring of each test. Rows that are about every interleaving are in `tests/sim/`.

| row | what it is about | test |
|---|---|---|
| vLLM 10 | bodies: null, wrong types, wrong engine id, foreign hosts | `test_rows_inputs.py::TestVllmRow10` |
| vLLM 10 | block ids and group counts | `test_rows_ranges.py::TestVllmRow10`, `::TestSglangRow21` |
| vLLM 11 | dead, black-holed and slow sources | `test_rows_handshake.py::TestVllmRow11`, `test_rows_inputs.py::TestVllmRow11` |
| vLLM 12 | another version, model, type or layout | `unit/core/test_card.py::TestVllmRow12`, `::TestSglangRow4` |
| vLLM 13 | frames that are no messages of a peer | `test_rows_frames.py::TestVllmRow13`, `test_rows_inputs.py::TestVllmRow13` |
| vLLM 13 | messages in the wrong state | `test_rows_frames.py::TestValidMessagesInTheWrongState` |
| vLLM 14 | a peer restarts on the same address | `test_rows_restart.py::TestVllmRow14` |
| vLLM 15 | endpoints of a grid of ranks, ports in use | `unit/core/test_topology.py::TestVllmRow15`, `unit/cli/test_exit_codes.py::test_a_port_in_use_is_refused_by_number` |
| vLLM 16 | handshakes by stage and rank: missing, twice, gaps, overlaps | `unit/core/test_topology.py::TestVllmRow16`, `::TestInstances` |
| vLLM 17 | ratios of tensor parallelism, and how many answers | `unit/core/test_rows_layouts.py::TestVllmRow17` |
| vLLM 19 | full and partial prefix hits, odd prompt lengths | `unit/engines/embedded/test_rows_vllm.py::TestRow19` |
| vLLM 20 | chunked prefill, preempted and resumed | `unit/engines/embedded/test_rows_vllm.py::TestRow20` |
| vLLM 21 | groups with block lists of their own; a failure is of the whole load | `unit/core/test_rows_layouts.py::TestVllmRow21`, `unit/engines/vllm/test_halves_target.py::test_a_load_that_failed_is_told_as_failed_and_never_asked_for_again` |
| vLLM 23 | back-pressure, 1,000 at once, one slow peer | `test_rows_load.py::TestVllmRow23` |
| vLLM 29 | an idle engine expires and goes idle | `test_rows_idle.py::TestVllmRow29`, `test_rows_inputs.py::TestVllmRow29` |
| vLLM 30 | preemption after landing, plain requests to decode | `unit/engines/embedded/test_rows_vllm.py::TestRow30` |
| vLLM 31 | nothing to move, or refused before admission | `unit/engines/embedded/test_rows_vllm.py::TestRow31` |
| vLLM 33 | role both; shutdown with hand-offs in flight | `test_rows_shutdown.py::TestVllmRow33` |
| vLLM 34 | a corrupt byte in transit | `test_rows_integrity.py::TestVllmRow34` |
| SGLang 1 | equal shapes, byte by byte | `unit/core/test_rows_layouts.py::TestSglangRow1` |
| SGLang 2 | tensor parallelism, replicated heads in both directions | `unit/core/test_rows_layouts.py::TestSglangRow2` |
| SGLang 3 | three to two; heads that cannot be cut | `unit/core/test_rows_layouts.py::TestSglangRow3` |
| SGLang 4 | layouts that differ | `unit/core/test_card.py::TestSglangRow4` |
| SGLang 5 | latents that all ranks hold | `unit/core/test_rows_layouts.py::TestSglangRow5` |
| SGLang 6 | pipeline stages | `unit/core/test_rows_layouts.py::TestSglangRow6` |
| SGLang 7 | context-parallel ranks | `unit/core/test_rows_layouts.py::TestSglangRow7` |
| SGLang 8 | Mamba states | `unit/core/test_rows_layouts.py::TestSglangRow8` |
| SGLang 9 | windows at the edges of pages | `unit/core/test_rows_layouts.py::TestSglangRow9` |
| SGLang 10 | chunked sends, the last one empty | `unit/engines/embedded/test_rows_sglang.py::TestRow10` |
| SGLang 14 | answers that come twice | `unit/core/test_rows_layouts.py::TestSglangRow14`, `sim/test_duplicates_and_order.py::TestDoubledReports` |
| SGLang 16 | an abort at the prefill side | `test_rows_abort.py::TestSglangRow16`, `test_rows_router.py::TestSglangRow16` |
| SGLang 17 | prefill killed in the middle, and back | `test_rows_restart.py::TestSglangRow17` |
| SGLang 20 | bad aux records | `test_rows_ranges.py::TestSglangRow20` |
| SGLang 21 | page indices | `test_rows_ranges.py::TestSglangRow21`, `unit/core/test_rows_layouts.py::TestSglangRow21` |
| SGLang 22 | control frames, foreign protocols | `test_rows_frames.py::TestSglangRow22`, `::TestValidMessagesInTheWrongState` |
| SGLang 23 | transient and permanent errors of a post | `test_rows_load.py::TestVllmRow23`, `::TestSglangRow23` |
| SGLang 25 | 1,000 hand-offs over 50 peers, a dead one among them | `test_rows_load.py::TestSglangRow25` |
| SGLang 28 | IPv6, wildcard binds, host names | `unit/engines/embedded/test_instance_modes.py::test_sglang_row_28_a_cache_is_handed_over_whatever_the_address_looks_like` |
| SGLang 30 | source data that is not ready | `test_rows_events.py::TestSglangRow30` |
| SGLang 31 | shutdown: threads, memory, reasons | `test_rows_shutdown.py::TestSglangRow31` |

This module fails when a test named here does not exist, or a row is missing.
"""  # noqa: E501

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = {
    "vLLM": {10, 11, 12, 13, 14, 15, 16, 17, 19, 20, 21, 23, 29, 30, 31, 33, 34},
    "SGLang": {*range(1, 11), 14, 16, 17, 20, 21, 22, 23, 25, 28, 30, 31},
}


def table() -> list[tuple[str, int, str]]:
    """(list, row, tests) of each line of the map."""
    text = ast.get_docstring(ast.parse(Path(__file__).read_text())) or ""
    found = re.findall(r"^\| (vLLM|SGLang) (\d+) \|[^|]*\| (.*) \|$", text, re.MULTILINE)
    return [(source, int(row), tests) for source, row, tests in found]


def test_every_row_is_in_the_map() -> None:
    assert {source: {row for name, row, _ in table() if name == source} for source in ROWS} == ROWS


def test_every_test_in_the_map_exists() -> None:
    path = Path(__file__)
    for _, row, tests in table():
        assert "::" in tests, f"row {row} names no test"
        for file, name in re.findall(r"`([\w/]+\.py)?::(\w+)`", tests):
            path = (HERE.parent if "/" in file else HERE) / file if file else path
            names = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
            assert name in names, f"row {row}: {name} is not in {path.name}"
