"""Tokenizers: there and back, text that arrives in pieces, chat templates that cannot do harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvbaton.engines.embedded.gguf_tokenizer import tokenizer_from_gguf
from kvbaton.engines.embedded.model_files import SafetensorsDir
from kvbaton.engines.embedded.text_stream import TextStream
from kvbaton.engines.embedded.tiny import write_tiny_model
from kvbaton.engines.embedded.tokenizer import Tokenizer, TokenizerFiles
from kvbaton.errors import BadRequest, ModelError

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    return SafetensorsDir(write_tiny_model(tmp_path_factory.mktemp("tokenizer") / "tiny")).tokenizer_files()


@pytest.fixture(scope="module")
def tokenizer(files: TokenizerFiles) -> Tokenizer:
    return Tokenizer(files, "tiny")


def with_template(files: TokenizerFiles, template: str) -> Tokenizer:
    return Tokenizer(msgspec.structs.replace(files, chat_template=template), "a.gguf")


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = TextStream(tokenizer)
    return "".join([*map(stream.feed, ids), stream.finish()])


@given(text=st.text())
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(text=st.text())
@example(text="<|im_end|>")
def test_any_text_streams_without_half_characters(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    ids = tokenizer.encode(text)
    parts = [stream.feed(token_id) for token_id in ids]
    # Special tokens in a text are recognised, and an answer is shown without them.
    assert "".join(parts) == tokenizer.decode(ids)
    assert stream.finish() == ""


@given(ids=st.lists(st.integers(0, 258), max_size=40))
def test_any_tokens_stream_to_what_they_decode_to(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_character_is_held_back_until_its_last_byte(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert [stream.feed(token_id) for token_id in tokenizer.encode("a🙂b")] == ["a", "", "", "", "🙂", "b"]


def test_unfinished_character_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert [stream.feed(token_id) for token_id in tokenizer.encode("é")[:1]] == [""]
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_one_token_and_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>x<|im_end|>")
    assert len(ids) == 3
    assert tokenizer.eos_ids == {ids[2]}
    assert tokenizer.decode(ids) == "x" == streamed(tokenizer, ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>x<|im_end|>"
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["<|im_start|>", "x", "<|im_end|>"]


def test_unknown_token_is_no_text(tokenizer: Tokenizer) -> None:
    assert streamed(tokenizer, [100_000]) == ""


def test_tokens_that_depend_on_their_neighbours_stream_too() -> None:
    """A sentencepiece-like tokenizer: spaces are part of words, bytes are tokens of their own."""
    vocab = {"<unk>": 0, "▁hello": 1, "▁world": 2, "!": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    description = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": True},
    }
    tokenizer = Tokenizer(TokenizerFiles(json.dumps(description)), "sentencepiece")
    smile = [4 + byte for byte in "🙂".encode()]
    stream = TextStream(tokenizer)
    fed = [stream.feed(token_id) for token_id in [1, 2, *smile, 3, 2]]
    assert fed == ["hello", " world", "", "", "", "🙂", "!", " world"]
    assert stream.finish() == ""
    assert streamed(tokenizer, [1, smile[0]]) == "hello\ufffd"


def test_chat_template_opens_the_answer(tokenizer: Tokenizer) -> None:
    assert tokenizer.apply_chat_template([USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_refusal_keeps_its_text(files: TokenizerFiles) -> None:
    tokenizer = with_template(files, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        tokenizer.apply_chat_template([USER])
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "messages", [[{"role": "user"}], [{"role": "user", "content": None}], [{}], [{"role": "user", "content": ["x"]}]]
)
def test_odd_messages_are_a_bad_request_or_text(files: TokenizerFiles, messages: list[dict[str, Any]]) -> None:
    tokenizer = with_template(files, "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}")
    with pytest.raises(BadRequest, match="chat template refused"):
        tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(10000000) | list }}",
        "{% include 'passwd' %}",
    ],
)
def test_template_cannot_leave_its_sandbox(files: TokenizerFiles, template: str) -> None:
    messages = [dict(USER)]
    with pytest.raises(BadRequest):
        with_template(files, template).apply_chat_template(messages)
    assert messages == [USER]


def test_template_helpers(files: TokenizerFiles) -> None:
    template = (
        "{{ bos_token }}{{ messages | tojson }}{{ strftime_now('%Y') | length }}{% for m in messages %}{% break %}{% endfor %}"
    )
    assert with_template(files, template).apply_chat_template([USER]) == '<|im_start|>[{"role": "user", "content": "hi"}]4'


def test_broken_template_is_found_at_load(files: TokenizerFiles) -> None:
    with pytest.raises(ModelError, match=r"a\.gguf: chat_template cannot be compiled"):
        with_template(files, "{% for %}")


def test_model_without_template_says_what_to_use(files: TokenizerFiles) -> None:
    with pytest.raises(BadRequest, match="/v1/completions"):
        with_template(files, "").apply_chat_template([USER])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"type": "Nonsense"}}', "not json"])
def test_broken_tokenizer_is_a_model_error(text: str) -> None:
    with pytest.raises(ModelError, match="tokenizer cannot be built"):
        Tokenizer(TokenizerFiles(text), "broken")


def gguf_metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<s>", "</s>", *(chr(code) for code in range(0x21, 0x7F)), "Ġ", "ab"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
def test_gguf_tokenizer_merges_and_begins(pre: str) -> None:
    tokenizer = Tokenizer(tokenizer_from_gguf(gguf_metadata(pre=pre), "m.gguf"), "m.gguf")
    ids = tokenizer.encode("ab 12")
    assert ids[0] == 0
    assert tokenizer.encode("ab 12", add_special_tokens=False) == ids[1:]
    assert tokenizer.token_text(ids[1]) == "ab"
    assert tokenizer.decode(ids) == "ab 12"
    assert tokenizer.eos_ids == {1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama', supported are gpt2"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2', supported are gpt-2, smollm, llama-bpe"),
        ({"tokens": []}, "tokenizer.ggml.tokens is missing"),
        ({"merges": [1, 2]}, "tokenizer.ggml.merges is missing or no list of texts"),
    ],
)
def test_gguf_tokenizer_of_another_kind_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(gguf_metadata(**changes), "m.gguf")


def test_template_file_wins_over_the_settings(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "tiny")
    (directory / "chat_template.jinja").write_text("separate")
    assert SafetensorsDir(directory).tokenizer_files().chat_template == "separate"
