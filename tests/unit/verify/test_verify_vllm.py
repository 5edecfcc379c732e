"""What `kvbaton verify` refuses with vLLM, before anything is installed or started."""

from __future__ import annotations

import pytest

from kvbaton.config import HandoffSettings
from kvbaton.core.handoff import AuxWay
from kvbaton.errors import ConfigError
from kvbaton.launch.vllm_ready import ready_vllm
from kvbaton.verify.run import VerifySettings, run_verify


def test_an_answer_that_leaves_no_room_for_a_prompt_is_refused() -> None:
    settings = VerifySettings(engine="vllm", model="tiny", max_tokens=2048)
    with pytest.raises(ConfigError, match="--max-tokens is 2048; the context has 2048 tokens"):
        run_verify(settings, print, print)


def test_a_way_of_the_aux_record_that_the_connector_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="--aux-way is data; with vLLM it is control"):
        ready_vllm("no-such-model", "x", "local", 2, HandoffSettings(aux_way=AuxWay.DATA), print)
