"""Hand-offs between engines with the real model: the embedded engine and SGLang, in both directions, and the control."""

from __future__ import annotations

import pytest
from test_sglang_verify import verify

pytestmark = [pytest.mark.sglang_full, pytest.mark.timeout(1800)]

DIRECTIONS = [("embedded", "sglang"), ("sglang", "embedded")]
SHORT = ("--requests", "4", "--longest-prompt", "60", "--max-tokens", "6", "--concurrency", "1")


@pytest.mark.parametrize(("prefill", "decode"), DIRECTIONS)
def test_answers_are_equal_within_what_two_kernels_allow(prefill: str, decode: str) -> None:
    engines = ("--prefill-engine", prefill, "--decode-engine", decode)
    code, document = verify(*SHORT, engine=engines)
    assert code == 0, document["problems"]
    assert document["handed_off"] == 4


@pytest.mark.parametrize(("prefill", "decode"), DIRECTIONS)
def test_the_control_notices_a_cache_that_never_arrived(prefill: str, decode: str) -> None:
    engines = ("--prefill-engine", prefill, "--decode-engine", decode)
    code, document = verify(*SHORT, "--drop-writes", engine=engines)
    assert code == 1
    assert document["different"] > 0
