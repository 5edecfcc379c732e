"""OpenAI-style request bodies: parsed, checked field by field, and turned into generation requests for the engine.

A bad value raises BadRequest with the name of the field and the value; nothing reaches the engine then. A `max_tokens`
beyond the rest of the context is cut to it, so that such an answer ends with `finish_reason` "length".

Sizes are checked before anything is tokenized, rendered or walked in a loop: a tokenizer takes many times the memory of its
text, and one long prompt could end the process.
"""

from __future__ import annotations

import math
import re
import uuid
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

import msgspec

from kvbaton.core.handoff import RequestId
from kvbaton.engines.embedded.request import GenerationRequest, Sampling, handoff_of
from kvbaton.engines.embedded.seams import ModelInfo, PromptTokenizer
from kvbaton.engines.embedded.settings import HttpSettings
from kvbaton.engines.handoff_params import HandoffParams, KVTransferParams, read_params
from kvbaton.errors import BadRequest

__all__ = [
    "ApiRequest",
    "ChatBody",
    "CompletionBody",
    "Message",
    "RequestLimits",
    "chat_request",
    "completion_request",
    "decode_body",
    "request_limits",
]

_DEFAULT_MAX_TOKENS = 16
_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 256
"""Every token of an answer is compared with every beginning of every stop string."""

_MAX_SALT_CHARACTERS = 1024
_PROMPTS_PER_REQUEST = 4
"""How many prompts of the largest size one request may hold, unless a setting gives its bytes."""

_MAX_LOGPROBS = 20
_MAX_SAMPLES = 128
_SEED_BITS = 63
_AT_PATH = re.compile(r"(?P<what>.*?) - at `\$\.?(?P<path>.*)`\Z", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")

Body = TypeVar("Body", bound="CompletionBody | ChatBody")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may hold, and which model name is served."""

    served_model: str
    context_tokens: int
    vocab_size: int
    prompt_bytes: int
    request_bytes: int
    sequences: int


def request_limits(model: ModelInfo, served_model: str, settings: HttpSettings) -> RequestLimits:
    """The limits of requests to `model`. A text of more than `prompt_bytes` cannot fit the context."""
    context_tokens = model.config.context_tokens
    prompt_bytes = settings.max_prompt_bytes or context_tokens * model.tokenizer.longest_token_bytes
    return RequestLimits(
        served_model=served_model,
        context_tokens=context_tokens,
        vocab_size=model.config.vocab_size,
        prompt_bytes=prompt_bytes,
        request_bytes=settings.max_request_bytes or _PROMPTS_PER_REQUEST * prompt_bytes,
        sequences=settings.max_request_sequences,
    )


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
    cache_salt: str | None = None
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
    """A checked request: one engine request per choice, in order, and the form of the response."""

    request_id: str | None
    is_chat: bool
    requests: tuple[GenerationRequest, ...]
    prompt_tokens: int
    stream: bool
    include_usage: bool
    tokens_as_ids: bool
    handoff: HandoffParams | None


def decode_body(raw: bytes, kind: type[Body]) -> Body:
    """Read a body; raises BadRequest for malformed JSON, and for a wrong type with the name of its field."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("body", f"the body is no valid JSON: {error}") from error


def completion_request(
    body: CompletionBody, tokenizer: PromptTokenizer, limits: RequestLimits, request_id: str | None
) -> ApiRequest:
    """Check a completions body and tokenize its prompts."""
    if body.echo:
        _bad("echo", "true is not supported; leave it out and put the prompt before the answer yourself")
    logprobs = _within("logprobs", body.logprobs, 0, _MAX_LOGPROBS)
    handoff = read_params(body.kv_transfer_params, request_id)
    sampling = _sampling(body, body.max_tokens, logprobs, _DEFAULT_MAX_TOKENS)
    texts = _completion_prompts(body.prompt, limits)
    samples = _samples(body.n, len(texts), limits)
    prompts = [tuple(tokenizer.encode(text)) if isinstance(text, str) else text for text in texts]
    return _assemble(body, prompts, samples, sampling, limits, handoff, request_id)


def chat_request(body: ChatBody, tokenizer: PromptTokenizer, limits: RequestLimits, request_id: str | None) -> ApiRequest:
    """Check a chat body, apply the chat template and tokenize."""
    top_logprobs = _within("top_logprobs", body.top_logprobs, 0, _MAX_LOGPROBS)
    if top_logprobs and not body.logprobs:
        _bad("top_logprobs", f"{top_logprobs} needs logprobs to be true")
    logprobs = (top_logprobs or 0) if body.logprobs else None
    handoff = read_params(body.kv_transfer_params, request_id)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    _within("max_completion_tokens", body.max_completion_tokens, 1, None)
    sampling = _sampling(body, max_tokens, logprobs, limits.context_tokens)
    samples = _samples(body.n, 1, limits)
    text = tokenizer.apply_chat_template(_conversation(body.messages, limits))
    _check_bytes(text, limits, "messages")
    prompt = tuple(tokenizer.encode(text, add_special_tokens=False))
    return _assemble(body, [prompt], samples, sampling, limits, handoff, request_id, field="messages")


def _assemble(
    body: CompletionBody | ChatBody,
    prompts: list[tuple[int, ...]],
    samples: int,
    sampling: Sampling,
    limits: RequestLimits,
    handoff: HandoffParams | None,
    request_id: str | None,
    field: str = "prompt",
) -> ApiRequest:
    unique = uuid.uuid4().hex
    requests = []
    for i, prompt in enumerate(prompts):
        room = _room(prompt, limits, field)
        for j in range(samples):
            name = RequestId(f"{unique}-{i}-{j}")
            key = handoff_of(handoff, i, j) if handoff else None
            requests.append(GenerationRequest(name, prompt, _of_sample(sampling, room, j), key, body.cache_salt or ""))
    return ApiRequest(
        request_id=request_id,
        is_chat=isinstance(body, ChatBody),
        requests=tuple(requests),
        prompt_tokens=sum(map(len, prompts)),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        handoff=handoff,
    )


def _of_sample(sampling: Sampling, room: int, sample_index: int) -> Sampling:
    seed = None if sampling.seed is None else (sampling.seed + sample_index) % 2**_SEED_BITS
    return replace(sampling, max_tokens=min(sampling.max_tokens, room), seed=seed)


def _sampling(body: CompletionBody | ChatBody, max_tokens: int | None, logprobs: int | None, default_max: int) -> Sampling:
    _within("max_tokens", body.max_tokens, 1, None)
    _check_salt(body.cache_salt)
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
    longest = max(map(len, stops), default=0)
    if longest > _MAX_STOP_CHARACTERS:
        _bad("stop", f"has an entry of {longest} characters; at most {_MAX_STOP_CHARACTERS} are possible")
    return stops


def _check_salt(salt: str | None) -> None:
    if salt == "":
        _bad("cache_salt", "is an empty string; send a secret of your own, or leave it out to share cached prefixes")
    if salt is not None and len(salt) > _MAX_SALT_CHARACTERS:
        _bad("cache_salt", f"has {len(salt)} characters; at most {_MAX_SALT_CHARACTERS} are possible")


def _samples(n: int | None, prompts: int, limits: RequestLimits) -> int:
    samples = 1 if n is None else n
    _within("n", samples, 1, _MAX_SAMPLES)
    if samples * prompts > limits.sequences:
        _bad("n", f"{samples} for each of {prompts} prompts makes {samples * prompts} sequences; {_sequence_limit(limits)}")
    return samples


def _sequence_limit(limits: RequestLimits) -> str:
    return f"a request has at most {limits.sequences} (max_request_sequences); send several requests"


def _room(prompt: tuple[int, ...], limits: RequestLimits, field: str) -> int:
    if not prompt:
        _bad(field, "has no tokens; send at least one")
    _check_tokens(len(prompt), limits, field)
    return limits.context_tokens - len(prompt)


def _check_tokens(tokens: int, limits: RequestLimits, field: str) -> None:
    if tokens >= limits.context_tokens:
        _bad(
            field,
            f"has {tokens} tokens, but the context of {limits.served_model} is {limits.context_tokens} tokens "
            "and one must be left for the answer; shorten it",
        )


def _check_bytes(text: str, limits: RequestLimits, field: str) -> int:
    """The UTF-8 bytes of `text`."""
    # Characters first: a text with too many of them is not even encoded.
    size = len(text) if len(text) > limits.prompt_bytes else len(text.encode("utf-8", "surrogatepass"))
    if size > limits.prompt_bytes:
        _bad(
            field,
            f"has {size} bytes; a prompt of {limits.served_model}, whose context is {limits.context_tokens} tokens, "
            f"has at most {limits.prompt_bytes} (max_prompt_bytes); shorten it",
        )
    return size


def _completion_prompts(prompt: str | list[str | int | list[int]], limits: RequestLimits) -> list[str | tuple[int, ...]]:
    """The prompts of a body, with their texts as they are. Counts are checked before entries: a long loop stops the server."""
    if isinstance(prompt, str):
        _check_bytes(prompt, limits, "prompt")
        return [prompt]
    if not prompt:
        _bad("prompt", "is an empty list; send a string, token ids, or a list of either")
    if isinstance(prompt[0], int):
        _check_tokens(len(prompt), limits, "prompt")
    elif len(prompt) > limits.sequences:
        _bad("prompt", f"has {len(prompt)} entries; {_sequence_limit(limits)}")
    kind = type(prompt[0])
    for position, entry in enumerate(prompt):
        if type(entry) is not kind:
            _bad("prompt", f"mixes kinds: entry 0 is {_kind(prompt[0])}, entry {position} is {_kind(entry)}")
    if kind is int:
        return [_token_ids([entry for entry in prompt if isinstance(entry, int)], limits, "prompt")]
    prompts: list[str | tuple[int, ...]] = []
    total_bytes = 0
    for position, entry in enumerate(prompt):
        field = f"prompt[{position}]"
        if isinstance(entry, str):
            total_bytes += _check_bytes(entry, limits, field)
            prompts.append(entry)
        elif isinstance(entry, list):
            _check_tokens(len(entry), limits, field)
            prompts.append(_token_ids(entry, limits, field))
    if total_bytes > limits.request_bytes:
        _bad(
            "prompt",
            f"{len(prompt)} prompts have {total_bytes} bytes together; a request has at most {limits.request_bytes} "
            "(max_request_bytes); send several requests",
        )
    return prompts


def _kind(entry: str | int | list[int]) -> str:
    return "a string" if isinstance(entry, str) else "a token id" if isinstance(entry, int) else "a list of token ids"


def _token_ids(ids: list[int], limits: RequestLimits, field: str) -> tuple[int, ...]:
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < limits.vocab_size:
            _bad(
                "prompt", f"{field}[{position}] is {token_id}, but token ids go from 0 to {limits.vocab_size - 1}", prefix=False
            )
    return tuple(ids)


def _conversation(messages: list[Message], limits: RequestLimits) -> list[dict[str, str]]:
    if not messages:
        _bad("messages", "is an empty list; send at least one message")
    if len(messages) > limits.context_tokens:
        _bad(
            "messages",
            f"has {len(messages)} entries; the context of {limits.served_model} is {limits.context_tokens} tokens; shorten it",
        )
    total_bytes, conversation = 0, []
    for index, message in enumerate(messages):
        total_bytes += _check_bytes(message.role, limits, f"messages[{index}].role")
        content = _content(index, message)
        total_bytes += _check_bytes(content, limits, f"messages[{index}].content")
        conversation.append({"role": message.role, "content": content})
    if total_bytes > limits.prompt_bytes:
        _bad(
            "messages",
            f"has {total_bytes} bytes; a conversation with {limits.served_model} has at most {limits.prompt_bytes} "
            "(max_prompt_bytes); shorten it",
        )
    return conversation


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
