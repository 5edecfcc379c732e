"""What a vLLM request wants of kvbaton: its `kv_transfer_params` and its id, read into the words of a hand-off."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from kvbaton.agent.engine_port import SourceRequest
from kvbaton.core.bounded import BoundedMap
from kvbaton.core.handoff import MAX_TRANSFER_ID, HandoffKey, Mode, TransferId, key_problem
from kvbaton.engines.handoff_params import (
    HandoffInfo,
    KVTransferParams,
    SourceCheck,
    SourceParams,
    TargetParams,
    answer_params,
    automatic_id,
    read_params,
)
from kvbaton.errors import BadRequest

__all__ = [
    "AutomaticIds",
    "EngineRequest",
    "HandoffInfo",
    "SourceCheck",
    "SourceParams",
    "RequestedHandoff",
    "answer_params",
    "indices",
    "is_refused",
    "named",
    "prompt_digest",
    "read_handoff",
    "shorten_prompt",
]

_SAMPLE = re.compile(r"(\d{1,9})_(?=\D)")
_PROMPTS = {
    "cmpl-": re.compile(r"-(\d{1,9})(?:-[0-9a-f]{8})?\Z"),
    "chatcmpl-": re.compile(r"_(\d{1,9})(?:-[0-9a-f]{8})?\Z"),
}
_RANDOM = re.compile(r"-[0-9a-f]{8}\Z")
_RENDERED = "generate-tokens-"
_MAX_TOGETHER = 4096
_MAX_REMEMBERED = 4096


class EngineRequest(Protocol):
    """What the connector reads of a vLLM request."""

    @property
    def request_id(self) -> str:
        """vLLM's own name of it."""

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """What the router, or the client, wants of the connector."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """The prompt; None where it came as embeddings."""

    @property
    def num_prompt_tokens(self) -> int:
        """How long the prompt is."""

    @property
    def num_computed_tokens(self) -> int:
        """How much of it, and of the answer, is in the cache."""

    @property
    def status(self) -> Any:
        """An enum; only the names of its ends are read."""

    @property
    def output_token_ids(self) -> Sequence[int]:
        """What was generated."""

    skip_reading_prefix_cache: bool
    """Whether vLLM computes all of the prompt, as it does for prompt_logprobs, whatever a connector answers."""


@dataclass(frozen=True, slots=True)
class RequestedHandoff:
    """What a request asks for: to be a source, to be a target, or, with a `problem`, something that cannot be."""

    key: HandoffKey | None
    source: SourceParams | None = None
    wanted: SourceRequest | None = None
    problem: str = ""


class AutomaticIds:
    """Transfer ids for prefills whose caller named none: all prompts and samples of one HTTP request get the same.

    vLLM does not state which requests belong together, so their ids must: those that are equal but for the marks that vLLM puts
    round them. A prompt and sample that comes a second time begins another HTTP request of the same id.
    """

    def __init__(self) -> None:
        self._given: BoundedMap[str, tuple[TransferId, set[tuple[int, int]]]] = BoundedMap(_MAX_REMEMBERED)

    def of(self, request_id: str) -> TransferId:
        """The transfer id of this request, for its first call and no other."""
        stem, prompt, sample = _parts(request_id)
        given = self._given.get(stem)
        if given is None or (prompt, sample) in given[1] or len(given[1]) >= _MAX_TOGETHER:
            given = (automatic_id(), set())
            self._given[stem] = given
        given[1].add((prompt, sample))
        return given[0]


def read_handoff(
    request: EngineRequest, mode: Mode, automatic: AutomaticIds, sources: SourceCheck | None = None
) -> RequestedHandoff | None:
    """What a request asks for; None for a plain one. Never raises: a client's mistake is a problem of its request.

    So is a source that `sources` does not let it dial.
    """
    params = request.kv_transfer_params
    if not isinstance(params, Mapping) or not (params.get("do_remote_decode") or params.get("do_remote_prefill")):
        return None
    try:
        given = msgspec.convert(dict(params), KVTransferParams)
        asked = read_params(given, request.request_id, lambda: automatic.of(request.request_id), has_dp_ranks=True)
    except (BadRequest, msgspec.ValidationError) as error:
        return RequestedHandoff(None, problem=f"kv_transfer_params: {error}")
    prompt, sample = indices(request.request_id)
    if asked is None:
        return None
    key = HandoffKey(asked.transfer_id, prompt, sample)
    problem = key_problem(key) or ("" if request.prompt_token_ids else "a prompt without token ids cannot be handed off")
    if getattr(request, "resumable", False):
        problem = problem or "a request whose prompt comes in parts cannot be handed off"
    if isinstance(asked, TargetParams) and sources is not None:
        problem = problem or sources.refusal(asked) or ""
    if problem:
        return RequestedHandoff(None, problem=problem)
    if isinstance(asked, TargetParams):
        wanted = SourceRequest(key, prompt_digest(request), asked.source, asked.source_incarnation, mode)
        return RequestedHandoff(key, wanted=wanted)
    return RequestedHandoff(key, source=asked)


def named(request: EngineRequest) -> str:
    """A request as log lines name it: vLLM's id, and the transfer id that both instances share, where it has one."""
    transfer_id = (request.kv_transfer_params or {}).get("transfer_id")
    if not isinstance(transfer_id, str):
        return f"request {request.request_id} (no transfer id)"
    shown = transfer_id[:MAX_TRANSFER_ID]
    return f"request {request.request_id} (transfer {shown if shown.isprintable() else ascii(shown)})"


def is_refused(request: EngineRequest) -> bool:
    """Whether vLLM refused the request before admission, and only releases its source; its prompt is not the true one then."""
    return bool(getattr(request, "abort_immediately", False))


def indices(request_id: str) -> tuple[int, int]:
    """Which prompt and which sample of an HTTP request this is, by what vLLM puts before and behind its id."""
    _, prompt, sample = _parts(request_id)
    return prompt, sample


def _parts(request_id: str) -> tuple[str, int, int]:
    """What all requests of one HTTP request have in common, and which prompt and sample this is.

    Several samples are `SAMPLE_...`; completions begin with `cmpl-` and end in `-PROMPT`, chats begin with `chatcmpl-` and end
    in `_PROMPT` where there are several; eight random hex digits may follow. In between there is what the client chose.
    """
    sample = _SAMPLE.match(request_id)
    stem = request_id[sample.end() :] if sample else request_id
    pattern = _PROMPTS.get(stem.removeprefix(_RENDERED).partition("-")[0] + "-")
    prompt = pattern.search(stem) if pattern else None
    stem = stem[: prompt.start()] if prompt else _RANDOM.sub("", stem)
    return stem, int(prompt[1]) if prompt else 0, int(sample[1]) if sample else 0


def shorten_prompt(request: Any, tokens: int) -> None:
    """Have vLLM compute the first `tokens` tokens of a prompt, and sample one token behind them, which no client sees.

    The target computes the last token of the prompt itself. The state of a request is that after its last computed token. Of a
    sliding window, vLLM keeps the blocks that the token after the last computed one looks back to, and gives the others away
    before it asks what becomes of them: had it computed the whole prompt, one block could be missing.
    """
    request.prompt_token_ids = request.prompt_token_ids[:tokens]  # a new list: in one process, others may have the old one
    del request._all_token_ids[tokens:]  # noqa: SLF001
    request.num_prompt_tokens = tokens
    request.max_tokens = 1
    # The last hash may be that of a block with the token that is gone: another one would be cached under it.
    if hashes := getattr(request, "block_hashes", None):
        hashes.pop()
        request.update_block_hashes()


def prompt_digest(request: EngineRequest) -> str:
    """What the prompt is, in short: both sides of a hand-off must have the same. Images, embeddings, adapter and salt too.

    vLLM shares cached prefixes between requests of one salt only. A target that took the cache of another salt would enter it
    into its own prefix cache under the wrong one, and one tenant would be served another's.
    """
    digest = hashlib.blake2b(array("q", request.prompt_token_ids or ()).tobytes(), digest_size=16)
    parts = [f"image {feature.identifier}" for feature in getattr(request, "mm_features", None) or ()]
    if (embeddings := getattr(request, "prompt_embeds", None)) is not None:
        parts.append(f"embeds {hashlib.blake2b(embeddings.float().numpy().tobytes(), digest_size=16).hexdigest()}")
    if (adapter := getattr(request, "lora_request", None)) is not None:
        parts.append(f"lora {adapter.lora_name}")
    if salt := getattr(request, "cache_salt", None):
        parts.append(f"salt {salt}")
    # With their lengths: clients choose the salt, and none may read as that of a request with another adapter or image.
    for part in (part.encode("utf-8", "surrogatepass") for part in parts):
        digest.update(b"|%d %b" % (len(part), part))
    return digest.hexdigest()
