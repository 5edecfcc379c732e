"""OpenAI-style responses: whole bodies and stream events, built from the engine's outputs. Compact JSON only.

vllm-router parses a response and prints it again under the old Content-Length. Numbers are rounded to six digits so that they
keep their length on that path.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from kvbaton.engines.embedded.openai import ApiRequest
from kvbaton.engines.embedded.request import FinishReason, RequestRecord, TokenOutput
from kvbaton.engines.handoff_params import shown_seconds

__all__ = ["DONE_EVENT", "ResponseBuilder", "ResponseChoice", "sse_event"]

DONE_EVENT = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0
_DIGITS = 6


def sse_event(body: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + body + b"\n\n"


@dataclass(slots=True)
class ResponseChoice:
    """The output of one choice so far."""

    texts: list[str] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)
    tokens: int = 0
    shown_characters: int = 0
    finish_reason: FinishReason | None = None
    record: RequestRecord | None = None
    started: bool = False


class ResponseBuilder:
    """The response to one API request as it grows: `add` takes outputs for `body`; `event` turns one output into an event."""

    def __init__(
        self,
        api: ApiRequest,
        model: str,
        token_text: Callable[[int], str],
        handoff_params: dict[str, object] | None = None,
        *,
        show_details: bool = True,
    ) -> None:
        self._api = api
        self._token_text = (lambda token_id: f"token_id:{token_id}") if api.tokens_as_ids else token_text
        self._choices = [ResponseChoice() for _ in api.requests]
        self._handoff_params = handoff_params
        self._show_details = show_details
        self._unfinished = len(self._choices)
        kind = ("chat.completion.chunk" if api.stream else "chat.completion") if api.is_chat else "text_completion"
        # The request id holds the control addresses of both instances, because real routers put them there.
        prefix = "chatcmpl" if api.is_chat else "cmpl"
        name = api.request_id if api.request_id and show_details else uuid.uuid4().hex
        self._head = {"id": f"{prefix}-{name}", "object": kind, "created": int(time.time()), "model": model}

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its finish reason."""
        return self._unfinished == 0

    def add(self, index: int, output: TokenOutput) -> None:
        """Take one output of choice `index` for a whole body."""
        choice = self._count(index, output)
        choice.texts.append(output.text)
        if output.token_id >= 0:
            choice.outputs.append(output)

    def body(self) -> bytes:
        """The whole response."""
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        return orjson.dumps({**self._head, "choices": choices, "usage": self._usage(), **self._extras()})

    def event(self, index: int, output: TokenOutput) -> bytes | None:
        """The stream event of one output of choice `index`; None when it has nothing to show."""
        choice = self._count(index, output)
        logprobs = self._logprobs(index, choice, [output] if output.token_id >= 0 else [])
        if not output.text and not logprobs and output.finish_reason is None:
            return None
        shown: dict[str, Any] = {"index": index}
        if self._api.is_chat:
            role = {} if choice.started else {"role": "assistant"}
            shown["delta"] = {**role, "content": output.text} if output.text or role else {}
        else:
            shown["text"] = output.text
        choice.started = True
        shown |= {"logprobs": logprobs, "finish_reason": output.finish_reason}
        usage = {"usage": None} if self._api.include_usage else {}
        return sse_event(
            orjson.dumps({**self._head, "choices": [shown], **usage, **(self._extras() if self.is_finished else {})})
        )

    def usage_event(self) -> bytes | None:
        """The event with the token counts; None unless the client requested it."""
        if not self._api.include_usage:
            return None
        return sse_event(orjson.dumps({**self._head, "choices": [], "usage": self._usage()}))

    def _count(self, index: int, output: TokenOutput) -> ResponseChoice:
        choice = self._choices[index]
        choice.tokens += output.token_id >= 0
        choice.record = output.record or choice.record
        if output.finish_reason is not None and choice.finish_reason is None:
            choice.finish_reason = output.finish_reason
            self._unfinished -= 1
        return choice

    def _whole_choice(self, index: int, choice: ResponseChoice) -> dict[str, Any]:
        text = "".join(choice.texts)
        content = {"message": {"role": "assistant", "content": text}} if self._api.is_chat else {"text": text}
        logprobs = self._logprobs(index, choice, choice.outputs)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _usage(self) -> dict[str, int]:
        generated = sum(choice.tokens for choice in self._choices)
        prompt = self._api.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def _extras(self) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._handoff_params is not None:
            extras["kv_transfer_params"] = self._handoff_params
        records = [None if choice.record is None else _record(choice.record) for choice in self._choices]
        if self._show_details and records[0] is not None:
            extras["kvbaton"] = records[0] if len(records) == 1 else {**records[0], "records": records}
        return extras

    def _logprobs(self, index: int, choice: ResponseChoice, outputs: list[TokenOutput]) -> dict[str, Any] | None:
        if self._api.requests[index].sampling.logprobs is None or not outputs:
            return None
        return self._chat_logprobs(outputs) if self._api.is_chat else self._completion_logprobs(choice, outputs)

    def _completion_logprobs(self, choice: ResponseChoice, outputs: list[TokenOutput]) -> dict[str, Any]:
        tokens = [self._token_text(output.token_id) for output in outputs]
        offsets = []
        for token in tokens:
            offsets.append(choice.shown_characters)
            choice.shown_characters += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_logprob(output.logprob) for output in outputs],
            "top_logprobs": [self._top_by_text(output) for output in outputs],
            "text_offset": offsets,
        }

    def _top_by_text(self, output: TokenOutput) -> dict[str, float]:
        shown: dict[str, float] = {}
        for token_id, logprob in (*output.top_logprobs, (output.token_id, output.logprob)):
            shown.setdefault(self._token_text(token_id), _logprob(logprob))
        return shown

    def _chat_logprobs(self, outputs: list[TokenOutput]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._chat_token(output.token_id, output.logprob),
                    "top_logprobs": [self._chat_token(*candidate) for candidate in output.top_logprobs],
                }
                for output in outputs
            ]
        }

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        return {"token": text, "logprob": _logprob(logprob), "bytes": list(text.encode())}


def _logprob(value: float) -> float:
    return round(max(_LOWEST_LOGPROB, value), _DIGITS)


def _record(record: RequestRecord) -> dict[str, Any]:
    fields = dataclasses.asdict(record)
    return {name: shown_seconds(value) if isinstance(value, float) else value for name, value in fields.items()}
