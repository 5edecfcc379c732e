"""OpenAI-style request bodies: parsed, checked field by field, and turned into generation requests for the engine.

Whatever is wrong raises BadRequest with the name of the field and the value; nothing reaches the engine then. A
`max_tokens` beyond the rest of the context is cut to it, so that such an answer ends with `finish_reason` "length".
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, TypeVar

import msgspec

from kvbaton.core.handoff import RequestId
from kvbaton.engines.embedded.request import GenerationRequest, Sampling, handoff_of
from kvbaton.engines.handoff_params import HandoffParams, KVTransferParams, read_params
from kvbaton.errors import BadRequest

__all__ = [
    "ApiRequest",
    "ChatBody",
    "CompletionBody",
    "Message",
    "ModelLimits",
    "Tokenizer",
    "chat_request",
    "completion_request",
    "decode_body",
]

_DEFAULT_MAX_TOKENS = 16
_MAX_STOPS = 16
_MAX_LOGPROBS = 20
_MAX_SAMPLES = 128
_MAX_CHOICES = 1024
_SEED_BITS = 63
_AT_PATH = re.compile(r"(?P<what>.*?) - at `\$\.?(?P<path>.*)`\Z", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")

Body = TypeVar("Body", bound="CompletionBody | ChatBody")


class Tokenizer(Protocol):
    """What the HTTP face needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """The token ids of `text`."""

    def token_text(self, token_id: int) -> str:
        """How one token is shown on its own."""

    def apply_chat_template(self, messages: list[dict[str, str]]) -> str:
        """The prompt of a conversation, special tokens included."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a prompt may be, and which model name is served."""

    served_model: str
    context_tokens: int
    vocab_size: int


class StreamOptions(msgspec.Struct, frozen=True):
    """The `stream_options` object."""

    include_usage: bool | None = None


class _CommonBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: int | None = None
    kv_transfer_params: KVTransferParams | None = None


class CompletionBody(_CommonBody, frozen=True, kw_only=True):
    """The body of POST /v1/completions; fields that are not listed are tolerated."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text can be used."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None


class ChatBody(_CommonBody, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions; fields that are not listed are tolerated."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A checked request: what goes to the engine, one per choice in choice order, and how the answer is to look."""

    response_id: str
    is_chat: bool
    requests: tuple[GenerationRequest, ...]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    tokens_as_ids: bool
    wish: HandoffParams | None


def decode_body(raw: bytes, kind: type[Body]) -> Body:
    """Read a body; raises BadRequest for malformed JSON, and for a wrong type with the name of its field."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("body", f"the body is no valid JSON: {error}") from error


def completion_request(body: CompletionBody, tokenizer: Tokenizer, limits: ModelLimits, request_id: str | None) -> ApiRequest:
    """Check a completions body and tokenize its prompts."""
    if body.echo:
        _bad("echo", "true is not supported; leave it out and put the prompt before the answer yourself")
    logprobs = _within("logprobs", body.logprobs, 0, _MAX_LOGPROBS)
    wish = read_params(body.kv_transfer_params, request_id)
    sampling = _sampling(body, body.max_tokens, logprobs, _DEFAULT_MAX_TOKENS)
    prompts = _completion_prompts(body.prompt, tokenizer, limits)
    return _assemble(body, prompts, sampling, limits, wish, f"cmpl-{request_id or uuid.uuid4().hex}")


def chat_request(body: ChatBody, tokenizer: Tokenizer, limits: ModelLimits, request_id: str | None) -> ApiRequest:
    """Check a chat body, apply the chat template and tokenize."""
    top_logprobs = _within("top_logprobs", body.top_logprobs, 0, _MAX_LOGPROBS)
    if top_logprobs and not body.logprobs:
        _bad("top_logprobs", f"{top_logprobs} needs logprobs to be true")
    logprobs = (top_logprobs or 0) if body.logprobs else None
    wish = read_params(body.kv_transfer_params, request_id)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    _within("max_completion_tokens", body.max_completion_tokens, 1, None)
    sampling = _sampling(body, wanted, logprobs, limits.context_tokens)
    text = tokenizer.apply_chat_template(_conversation(body.messages))
    prompt = tuple(tokenizer.encode(text, add_special_tokens=False))
    return _assemble(body, [prompt], sampling, limits, wish, f"chatcmpl-{request_id or uuid.uuid4().hex}", field="messages")


def _assemble(
    body: CompletionBody | ChatBody,
    prompts: list[tuple[int, ...]],
    sampling: Sampling,
    limits: ModelLimits,
    wish: HandoffParams | None,
    response_id: str,
    field: str = "prompt",
) -> ApiRequest:
    samples = _samples(body.n, len(prompts))
    unique = uuid.uuid4().hex
    requests = []
    for i, prompt in enumerate(prompts):
        room = _room(prompt, limits, field)
        for j in range(samples):
            name = RequestId(f"{unique}-{i}-{j}")
            handoff = handoff_of(wish, i, j) if wish else None
            requests.append(GenerationRequest(name, prompt, _of_sample(sampling, room, j), handoff))
    return ApiRequest(
        response_id=response_id,
        is_chat=isinstance(body, ChatBody),
        requests=tuple(requests),
        prompt_tokens=sum(map(len, prompts)),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        wish=wish,
    )


def _of_sample(sampling: Sampling, room: int, sample_index: int) -> Sampling:
    return Sampling(
        max_tokens=min(sampling.max_tokens, room),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=None if sampling.seed is None else (sampling.seed + sample_index) % 2**_SEED_BITS,
        stop=sampling.stop,
        logprobs=sampling.logprobs,
        ignore_eos=sampling.ignore_eos,
    )


def _sampling(body: CompletionBody | ChatBody, max_tokens: int | None, logprobs: int | None, default_max: int) -> Sampling:
    _within("max_tokens", body.max_tokens, 1, None)
    if body.prompt_logprobs is not None:
        _bad(
            "prompt_logprobs", f"{body.prompt_logprobs} is not supported: only tokens of the answer have logprobs; leave it out"
        )
    temperature = 1.0 if body.temperature is None else body.temperature
    if not (math.isfinite(temperature) and temperature >= 0):
        _bad("temperature", f"{temperature} is not possible; send 0 for greedy, or a number above it")
    top_p = 1.0 if body.top_p is None else body.top_p
    if not 0 < top_p <= 1:
        _bad("top_p", f"{top_p} is not possible; it must be above 0 and at most 1")
    return Sampling(
        max_tokens=default_max if max_tokens is None else max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=_within("seed", body.seed, -(2**_SEED_BITS), 2**_SEED_BITS - 1),
        stop=_stops(body.stop),
        logprobs=logprobs,
        ignore_eos=bool(body.ignore_eos),
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > _MAX_STOPS:
        _bad("stop", f"has {len(stops)} entries; at most {_MAX_STOPS} are possible")
    if "" in stops:
        _bad("stop", f"entry {stops.index('')} is an empty string, which would stop every answer; leave it out")
    return stops


def _samples(n: int | None, prompts: int) -> int:
    samples = 1 if n is None else n
    _within("n", samples, 1, _MAX_SAMPLES)
    if samples * prompts > _MAX_CHOICES:
        _bad(
            "n",
            f"{samples} for each of {prompts} prompts makes {samples * prompts} choices; at most {_MAX_CHOICES} are possible",
        )
    return samples


def _room(prompt: tuple[int, ...], limits: ModelLimits, field: str) -> int:
    if not prompt:
        _bad(field, "has no tokens; send at least one")
    room = limits.context_tokens - len(prompt)
    if room < 1:
        _bad(
            field,
            f"has {len(prompt)} tokens, but the context of {limits.served_model} is {limits.context_tokens} tokens "
            "and one must be left for the answer; shorten it",
        )
    return room


def _completion_prompts(
    prompt: str | list[str | int | list[int]], tokenizer: Tokenizer, limits: ModelLimits
) -> list[tuple[int, ...]]:
    if isinstance(prompt, str):
        return [tuple(tokenizer.encode(prompt))]
    if not prompt:
        _bad("prompt", "is an empty list; send a string, token ids, or a list of either")
    if len(prompt) > _MAX_CHOICES and not isinstance(prompt[0], int):
        _bad("prompt", f"has {len(prompt)} entries; at most {_MAX_CHOICES} are possible")
    kind = type(prompt[0])
    for position, entry in enumerate(prompt):
        if type(entry) is not kind:
            _bad("prompt", f"mixes kinds: entry 0 is {_kind(prompt[0])}, entry {position} is {_kind(entry)}")
    if kind is int:
        return [_token_ids([entry for entry in prompt if isinstance(entry, int)], limits, "prompt")]
    prompts = []
    for position, entry in enumerate(prompt):
        if isinstance(entry, str):
            prompts.append(tuple(tokenizer.encode(entry)))
        elif isinstance(entry, list):
            prompts.append(_token_ids(entry, limits, f"prompt[{position}]"))
    return prompts


def _kind(entry: str | int | list[int]) -> str:
    return "a string" if isinstance(entry, str) else "a token id" if isinstance(entry, int) else "a list of token ids"


def _token_ids(ids: list[int], limits: ModelLimits, field: str) -> tuple[int, ...]:
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < limits.vocab_size:
            _bad(
                "prompt", f"{field}[{position}] is {token_id}, but token ids go from 0 to {limits.vocab_size - 1}", prefix=False
            )
    return tuple(ids)


def _conversation(messages: list[Message]) -> list[dict[str, str]]:
    if not messages:
        _bad("messages", "is an empty list; send at least one message")
    return [{"role": message.role, "content": _content(index, message)} for index, message in enumerate(messages)]


def _content(index: int, message: Message) -> str:
    field = f"messages[{index}].content"
    if message.content is None:
        if message.role != "assistant":
            _bad(field, f"is missing or null in a message of role {message.role!r}; send a string")
        return ""
    if isinstance(message.content, str):
        return message.content
    for position, part in enumerate(message.content):
        if part.type != "text":
            _bad(field, f"part {position} is of type {part.type!r}; this model reads parts of type 'text' only")
        if part.text is None:
            _bad(field, f"part {position} is of type 'text' and has no text")
    return "".join(part.text or "" for part in message.content)


def _within(field: str, value: int | None, low: int, high: int | None) -> int | None:
    if value is not None and (value < low or (high is not None and value > high)):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        _bad(field, f"{value} is not possible; it must be {limits}")
    return value


def _bad(field: str, message: str, *, prefix: bool = True) -> NoReturn:
    raise BadRequest(field, f"{field}: {message}" if prefix else message)


def _wrong_type(message: str) -> BadRequest:
    placed = _AT_PATH.match(message)
    what, path = (placed["what"], placed["path"]) if placed else (message, "")
    missing = _MISSING.search(what)
    if missing:
        field = f"{path}.{missing['name']}" if path else missing["name"]
        return BadRequest(field, f"{field}: is missing")
    field = path or "body"
    return BadRequest(field, f"{field}: {what}")
