"""One request's state: which text it shows, when it ends, and which seed it uses."""

from __future__ import annotations

from typing import Any

import pytest
from engine_fakes import BLOCK_TOKENS, EOS, SOURCE, fake_tokenizer, key_of, make_config

from kvbaton.core.handoff import RequestId
from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.request import FinishReason, FromSource, GenerationRequest, Sampling, TokenOutput, ToTarget
from kvbaton.engines.embedded.sampling import Sampled
from kvbaton.engines.embedded.sequence import Sequence, choose_seed
from kvbaton.errors import Bug


def request(handoff: ToTarget | FromSource | None = None, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(RequestId("r"), (1, 2, 3), Sampling(**{"max_tokens": 10, **sampling}), handoff)


def sequence(asked: GenerationRequest, limit: int = 100) -> Sequence:
    cache = PagedCache(make_config(), 1, BLOCK_TOKENS)
    return Sequence(asked, lambda _: None, fake_tokenizer(), number=0, limit=limit, cache=cache, submitted_s=1.0)


def feed(one: Sequence, *token_ids: int) -> list[TokenOutput]:
    return [one.append(Sampled(token_id), 2.0) for token_id in token_ids]


def test_the_end_of_sequence_token_stops_and_is_not_shown() -> None:
    outputs = feed(sequence(request()), 1, EOS)
    assert [output.text for output in outputs] == ["b", ""]
    assert [output.finish_reason for output in outputs] == [None, FinishReason.STOP]
    assert outputs[-1].record is not None
    assert outputs[-1].record.first_token_s == 1.0


def test_an_ignored_end_of_sequence_token_goes_on() -> None:
    assert feed(sequence(request(ignore_eos=True)), EOS)[0].finish_reason is None


@pytest.mark.parametrize(("max_tokens", "limit"), [(2, 100), (50, 5)])
def test_max_tokens_and_the_context_end_an_answer(max_tokens: int, limit: int) -> None:
    outputs = feed(sequence(request(max_tokens=max_tokens), limit), 1, 2)
    assert [output.finish_reason for output in outputs] == [None, FinishReason.LENGTH]


def test_a_source_ends_after_one_token() -> None:
    assert feed(sequence(request(ToTarget(key_of("k")))), 1)[0].finish_reason is FinishReason.LENGTH


def test_a_stop_string_ends_the_answer_and_is_never_shown() -> None:
    outputs = feed(sequence(request(stop=("cd",))), 1, 2, 3)
    assert [output.text for output in outputs] == ["b", "", ""]
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_text_held_back_is_shown_when_the_answer_ends() -> None:
    outputs = feed(sequence(request(stop=("cd",), max_tokens=2)), 1, 2)
    assert [output.text for output in outputs] == ["b", "c"]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert [output.text for output in feed(sequence(request(stop=("cd",))), 2, EOS)] == ["", "c"]


def test_half_a_character_waits_for_its_other_half() -> None:
    assert [output.text for output in feed(sequence(request()), 90, 91)] == ["", "é"]
    assert feed(sequence(request(max_tokens=1)), 90)[0].text == "\ufffd"


def test_both_sides_of_a_handoff_choose_the_same_seed() -> None:
    source, target = request(ToTarget(key_of("k"))), request(FromSource(key_of("k"), SOURCE))
    assert choose_seed(source) == choose_seed(target)
    assert choose_seed(source) != choose_seed(request(ToTarget(key_of("l"))))
    assert choose_seed(request(ToTarget(key_of("k")), seed=5)) == 5
    assert choose_seed(request()) != choose_seed(request())


def test_only_a_handoff_has_a_key() -> None:
    assert sequence(request(ToTarget(key_of("k")))).key == key_of("k")
    with pytest.raises(Bug, match="no hand-off"):
        _ = sequence(request()).key
