"""Whatever a body holds, it becomes generation requests that can run, or a BadRequest that names a field."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import CONTEXT, VOCAB, CharTokenizer

from kvbaton.engines.embedded.openai import (
    ApiRequest,
    ChatBody,
    CompletionBody,
    RequestLimits,
    chat_request,
    completion_request,
    decode_body,
)
from kvbaton.errors import BadRequest

LIMITS = RequestLimits("tiny", CONTEXT, VOCAB, prompt_bytes=4 * CONTEXT, request_bytes=16 * CONTEXT, sequences=256)
SCALARS = st.none() | st.booleans() | st.integers(-3, 70) | st.floats(-2, 3) | st.text(max_size=5)
PROMPTS = SCALARS | st.lists(SCALARS | st.lists(st.integers(-1, 300), max_size=4), max_size=4)
COMMON = dict.fromkeys(("n", "max_tokens", "temperature", "top_p", "seed", "stream", "ignore_eos", "logprobs", "echo"), SCALARS)
STOPS = SCALARS | st.lists(st.text(max_size=2), max_size=18)


def parsed(body: dict[str, Any]) -> ApiRequest:
    return completion_request(decode_body(orjson.dumps(body), CompletionBody), CharTokenizer(), LIMITS, None)


def check(api: ApiRequest) -> None:
    assert api.requests
    for request in api.requests:
        sampling = request.sampling
        assert 1 <= sampling.max_tokens <= CONTEXT - len(request.prompt_ids)
        assert all(0 <= token_id < VOCAB for token_id in request.prompt_ids)
        assert sampling.temperature >= 0
        assert 0 < sampling.top_p <= 1
        assert sampling.seed is None or sampling.seed >= 0
        assert "" not in sampling.stop
        assert sampling.logprobs is None or 0 <= sampling.logprobs <= 20


@given(st.fixed_dictionaries({}, optional={**COMMON, "prompt": PROMPTS, "stop": STOPS}))
def test_any_completion_is_understood_or_refused(body: dict[str, Any]) -> None:
    refusal = ""
    try:
        check(parsed(body))
    except BadRequest as error:
        refusal = error.field
    assert refusal.split(".")[0].split("[")[0] in {"", *body, "prompt"}


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"])},
        optional={"content": SCALARS | st.lists(st.fixed_dictionaries({"type": st.text(max_size=4), "text": SCALARS}))},
    ),
    max_size=3,
)


@given(st.fixed_dictionaries({"messages": MESSAGES}, optional={**COMMON, "top_logprobs": SCALARS, "stop": STOPS}))
def test_any_chat_is_understood_or_refused(body: dict[str, Any]) -> None:
    refusal = ""
    try:
        check(chat_request(decode_body(orjson.dumps(body), ChatBody), CharTokenizer(), LIMITS, None))
    except BadRequest as error:
        refusal = error.field
    assert refusal.split(".")[0].split("[")[0] in {"", *body}


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
@given(raw=st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(kind: type[CompletionBody] | type[ChatBody], raw: bytes) -> None:
    with pytest.raises(BadRequest):
        decode_body(raw, kind)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
    ],
)
def test_the_four_kinds_of_prompt(prompt: object, ids: list[tuple[int, ...]]) -> None:
    api = parsed({"prompt": prompt})
    assert [request.prompt_ids for request in api.requests] == ids
    assert api.prompt_tokens == sum(map(len, ids))


def test_all_of_a_sampling_reaches_the_engine() -> None:
    fields = {"temperature": 0, "top_p": 0.5, "stop": "x", "ignore_eos": True, "logprobs": 3, "max_tokens": 4}
    sampling = parsed({"prompt": "p", **fields}).requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.stop) == (0.0, 0.5, ("x",))
    assert (sampling.ignore_eos, sampling.logprobs, sampling.max_tokens) == (True, 3, 4)


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63 - 1])
def test_extreme_seeds_become_usable_and_distinct(seed: int) -> None:
    seeds = [request.sampling.seed for request in parsed({"prompt": "p", "seed": seed, "n": 2}).requests]
    assert all(value is not None and 0 <= value < 2**63 for value in seeds)
    assert len(set(seeds)) == 2


def test_long_token_list_is_one_prompt_not_many() -> None:
    with pytest.raises(BadRequest, match="2000 tokens"):
        parsed({"prompt": [1] * 2000})
