"""What answers of a small model depend on: runs inside vLLM's environment, `small_model_checks.py RESULTS < MODELS`.

Standard input has a JSON list of [name, directory, arguments]. Each model is loaded by plain vLLM in a process of its own, and
answers; then again with one head, one layer's attention or one layer's state taken out on its way, one after the other. The
result, by model: `groups` of its cache, `tokens`, `moved` (the largest change of a logprob by what was taken out), `accepted`
and `drafted`. A model that does not start has `error` instead.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 600
ANSWER_TOKENS = 12
OUTPUTS = ("o_proj", "out_proj")


def options(directory: str, arguments: list[str]) -> dict[str, Any]:
    """Of `LLM`, as the servers have them."""
    found: dict[str, Any] = {
        "model": directory,
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 128 << 20,
        "disable_log_stats": False,
    }
    if "--no-enable-prefix-caching" in arguments:
        found["enable_prefix_caching"] = False
    if "--max-num-batched-tokens" in arguments:
        found["max_num_batched_tokens"] = int(arguments[arguments.index("--max-num-batched-tokens") + 1])
    if "--speculative-config" in arguments:
        found["speculative_config"] = json.loads(arguments[arguments.index("--speculative-config") + 1])
    return found


class Asked:
    """A loaded model that answers the same prompt again and again."""

    def __init__(self, directory: str, arguments: list[str]) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(**options(directory, arguments))
        self._sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=5)
        self._prompt = [(7 * i * i + 13 * i + i // 7) % 251 for i in range(PROMPT_TOKENS)]

    def answer(self) -> tuple[list[int], list[float]]:
        """Tokens and their logprobs; nothing of an earlier answer is in the cache."""
        self.llm.reset_prefix_cache()
        (output,) = self.llm.generate([{"prompt_token_ids": self._prompt}], self._sampling, use_tqdm=False)
        (given,) = output.outputs
        return list(given.token_ids), [each[token].logprob for token, each in zip(given.token_ids, given.logprobs, strict=True)]

    def outputs(self) -> dict[str, Any]:
        """What mixes the heads of each layer; of the model itself, without its draft."""
        runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        return {name: module for name, module in runner.model.named_modules() if name.endswith(OUTPUTS)}

    def groups(self) -> list[str]:
        """The groups of its cache."""
        config = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        return [f"{type(group.kv_cache_spec).__name__} {len(group.layer_names)}" for group in config.kv_cache_groups]


def check(directory: str, arguments: list[str]) -> dict[str, Any]:
    """What the answers of one model depend on."""
    asked = Asked(directory, arguments)
    config = json.loads((Path(directory) / "config.json").read_text())
    tokens, logprobs = asked.answer()
    again = asked.answer()
    assert again[0] == tokens, "two answers to one prompt differ"
    found: dict[str, Any] = {"groups": asked.groups(), "tokens": tokens, "logprobs": logprobs, "moved": {}}
    for name, module in asked.outputs().items():
        has_heads = "attn" in name and "kv_lora_rank" not in config
        parts = config.get("num_key_value_heads", 1) if has_heads else 1
        for part in range(parts):
            hook = module.register_forward_pre_hook(functools.partial(without, part, parts))
            found["moved"][f"{name} {part}"] = change((tokens, logprobs), asked.answer())
            hook.remove()
    assert asked.answer()[0] == tokens, "what was taken out was put back"
    for metric in asked.llm.get_metrics():
        if metric.name in ("vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_draft_tokens"):
            found["accepted" if "accepted" in metric.name else "drafted"] = metric.value
    return found


def without(part: int, parts: int, _module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The input of a module with one of so many equal parts of its last axis set to 0."""
    values = given[0].clone()
    values.chunk(parts, dim=-1)[part].zero_()
    return (values, *given[1:])


def change(before: tuple[list[int], list[float]], after: tuple[list[int], list[float]]) -> float:
    """The largest change of a logprob among the first tokens that are the same; of the first that is not, at least 1."""
    largest = 0.0
    for token, other, one, two in zip(before[0], after[0], before[1], after[1], strict=True):
        largest = max(largest, abs(one - two))
        if token != other:
            return max(largest, 1.0)
    return largest


def main(results: Path) -> None:
    """Check each model in a child that has vLLM imported already."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    models = json.load(sys.stdin)
    import vllm  # noqa: F401

    found = {}
    for name, directory, arguments in models:
        part = results.with_suffix(f".{name}")
        child = os.fork()
        if child == 0:
            try:
                part.write_text(json.dumps(check(directory, arguments)))
            except BaseException:  # noqa: BLE001
                part.write_text(json.dumps({"error": traceback.format_exc()[-3000:]}))
            os._exit(0)
        os.waitpid(child, 0)
        found[name] = json.loads(part.read_text()) if part.exists() else {"error": "it ended without a result"}
        results.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
