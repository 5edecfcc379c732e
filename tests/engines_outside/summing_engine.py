"""An engine that is no part of kvbaton: each token of an answer is computed from the cache rows of all tokens before it."""

import threading
from types import SimpleNamespace as Facts
from typing import Any

import numpy as np

from kvbaton.agent.engine_port import Allocation, Granted, Landed, Offer, SourceRequest, TargetEnded
from kvbaton.core import handoff, layout, tensors
from kvbaton.core.grants import may_start_prefill
from kvbaton.engines import base, instance, serving
from kvbaton.engines.embedded.request import FinishReason, FromSource, GenerationRequest, RequestRecord, Sink, TokenOutput
from kvbaton.engines.embedded.sequence import prompt_digest
from kvbaton.engines.embedded.stats import EngineStats
from kvbaton.errors import LocalError
from kvbaton.transport.shared_memory import SharedMemory

BLOCKS, BLOCK_TOKENS, CONTEXT, VOCABULARY = 1024, 16, 256, 251
LARGEST = CONTEXT // BLOCK_TOKENS
MODEL = instance.ModelIdentity("sums", "sums of cache rows")


def encode(text: str, *, add_special_tokens: bool = True) -> list[int]:
    return [byte % VOCABULARY for byte in text.encode()]


class SummingPlugin(base.EnginePlugin):
    name, title = "summing", "the summing engine"

    def check(self, prefill: base.EngineOptions, decode: base.EngineOptions, progress: base.Progress) -> base.ModelFacts:
        return base.ModelFacts(MODEL.name, CONTEXT, encode)

    def prepare(self, options: base.EngineOptions, progress: base.Progress) -> base.PreparedEngine:
        return serving.ModuleServers(options, "summing_engine")


class SummingEngine:
    def __init__(self, settings: serving.LocalSettings) -> None:
        config, tokenizer = (
            Facts(context_tokens=CONTEXT, vocab_size=VOCABULARY),
            Facts(encode=encode, token_text=str, longest_token_bytes=1),
        )
        self.loaded: Any = Facts(config=config, tokenizer=tokenizer, name=MODEL.name, fingerprint=MODEL.fingerprint)
        self.lock, self.free, self.mode = threading.RLock(), list(range(BLOCKS)), settings.handoff.mode
        self.live: dict[handoff.HandoffKey, tuple[GenerationRequest, Sink, list[int]]] = {}
        memory = SharedMemory(BLOCKS * BLOCK_TOKENS * 8)
        self.rows = np.frombuffer(memory.array, np.float32).reshape(BLOCKS, BLOCK_TOKENS, 2)
        tensor = tensors.LayerTensor(0, self.rows.shape, self.rows.strides, "float32", 4)
        axes, heads = ("block", "token", "channel"), (layout.HeadRange(0, 1),)
        group = tensors.tensor_group("full", (0,), (tensor,), axes, heads=heads, total_heads=1, planes=("kv",))
        cache, name = layout.Layout(self.rows.nbytes, (group,)), instance.new_incarnation()
        self.driver = instance.open_driver(settings.agents(), name, MODEL, cache, memory.region, self.take_events)

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        tokens, side = len(request.prompt_ids), request.handoff
        needed = -(-(tokens + request.sampling.max_tokens) // BLOCK_TOKENS)
        with self.lock:
            free = len(self.free)
            if not may_start_prefill(free_blocks=free, needed_blocks=needed, reserved_blocks=LARGEST, has_grant=False):
                raise LocalError("too few blocks are free; try again later")
            blocks = [self.free.pop() for _ in range(needed)]
            of_prompt = (tuple(blocks[: -(-tokens // BLOCK_TOKENS)]),)
            if side is not None:
                self.live[side.key] = request, sink, blocks
            if isinstance(side, FromSource):
                self.rows[blocks] = 0.5
                self.driver.expect_source(self.wanted(request, side))
                self.driver.allocated(Allocation(self.wanted(request, side), of_prompt, tokens, 0))
                return
            for position, token in enumerate(request.prompt_ids):
                self.write(blocks, position, token)
            if side is not None:
                self.driver.expect_target(side.key, prompt_digest(request))
                self.driver.offer(Offer(side.key, of_prompt, tokens, handoff.Aux(0, 0.0)))
            self.answer(request, sink, blocks, RequestRecord())
            self.free += blocks if side is None else []

    def take_events(self) -> None:
        with self.lock:
            for event in (event for event in self.driver.events() if not isinstance(event, Granted)):
                request, sink, blocks = self.live.pop(event.key)
                if isinstance(event, Landed):
                    moved = event.stats
                    record = RequestRecord(True, bytes_planned=moved.bytes_planned, bytes_moved=moved.bytes_moved)
                    self.answer(request, sink, blocks, record)
                elif isinstance(event, TargetEnded):
                    sink(TokenOutput(-1, "", finish_reason=FinishReason.ERROR, error=event.reason))
                self.free += blocks

    def answer(self, request: GenerationRequest, sink: Sink, blocks: list[int], record: RequestRecord) -> None:
        end = len(request.prompt_ids) + request.sampling.max_tokens
        for position in range(len(request.prompt_ids), end):
            token = int(self.rows[blocks].reshape(-1, 2)[:position].sum() * 7) % VOCABULARY
            self.write(blocks, position, token)
            reason = FinishReason.LENGTH if position + 1 == end else None
            sink(TokenOutput(token, str(token), -0.5, ((token, -0.5), (0, -2.0)), reason, record=record))

    def write(self, blocks: list[int], position: int, token: int) -> None:
        self.rows[blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = (token * (position + 1) % 89, 1)

    def wanted(self, request: GenerationRequest, side: FromSource) -> SourceRequest:
        return SourceRequest(side.key, prompt_digest(request), side.source, side.source_incarnation, self.mode)

    def cancel(self, request_id: str) -> None:
        for key in [key for key, (request, *_) in self.live.items() if request.request_id == request_id]:
            self.driver.cancel(key)

    def decline(self, request: GenerationRequest, reason: str) -> None:
        if isinstance(request.handoff, FromSource):
            self.driver.decline(self.wanted(request, request.handoff), reason)

    def stats(self) -> EngineStats:
        return EngineStats(BLOCKS, len(self.free), BLOCKS - len(self.free), 0, 0, {}, {}, {}, 0, 0, 0, 0, 0)


if __name__ == "__main__":
    serving.serve_local(SummingEngine)
