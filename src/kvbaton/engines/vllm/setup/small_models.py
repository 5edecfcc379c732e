"""Small models of every kind of cache for real vLLM: their configurations, and the directories that are made of them on demand.

Each is a real architecture of vLLM in small dimensions, with random weights that `write_small_model.py` derives from the names
of the tensors alone: the same on every machine, and unequal in every layer and head. So a head, layer or state that is missing,
swapped or shifted changes logprobs. A model may have a companion that drafts tokens for it. Every byte of a text is one token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.config import nearest_known
from kvbaton.engines.base import Progress
from kvbaton.engines.vllm.setup.environment import VllmEnvironment
from kvbaton.errors import ModelError
from kvbaton.launch.installing import do_once, run_logged

__all__ = [
    "CACHE_BYTES",
    "CONTEXT_TOKENS",
    "PREFIX",
    "SMALL_MODELS",
    "MadeModel",
    "SmallModel",
    "ensure_small_model",
    "find_small_model",
    "is_small_model",
]

PREFIX = "small-"
"""Of the names of these models."""

CONTEXT_TOKENS = 4096
"""Prompt and answer together."""

CACHE_BYTES = 1 << 28
"""What the cache of a rank may take: vLLM fills it with zeros, and there are many ranks on a machine."""

_WRITE_S = 900.0
_SCRIPT = Path(__file__).with_name("write_small_model.py")

_VOCABULARY = 259
_COMMON = {
    "vocab_size": _VOCABULARY,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "hidden_size": 128,
    "intermediate_size": 256,
    "rms_norm_eps": 1e-5,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
_GQA = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": CONTEXT_TOKENS // 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    }
}
"""Of DeepSeek-V2. Without it vLLM 0.32 on CPUs rotates the query and the key of a token of MLA otherwise in a step of one token
than in a longer one: its own answers depend on what is computed together, and no hand-off could be compared with them."""
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}


@dataclass(frozen=True, slots=True)
class SmallModel:
    """One model: its `config.json`, and what it needs of a server.

    `kinds` are the kinds of its caches, in the words of `--drop`: heads, layers, state, draft.
    """

    about: str
    config: Mapping[str, Any]
    kinds: tuple[str, ...] = ("heads", "layers")
    caches_prefixes: bool = True
    """Whether vLLM can cache prefixes of it on CPUs."""
    draft: str = ""
    """How tokens are drafted: `eagle`, `mtp` (by a layer in the checkpoint), `draft_model`, `ngram`, or not at all."""
    draft_config: Mapping[str, Any] = field(default_factory=dict)
    """What the companion has otherwise than the model."""
    revision: int = 1
    """Part of the directory in which it is kept; raised when what is written changes."""


def _llama(**changed: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        **_ROPE,
        **changed,
    }


def _mla(**changed: Any) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        **_GQA,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 4,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "hidden_act": "silu",
        **_YARN,
        **changed,
    }


_DRAFTS = ("heads", "layers", "draft")

SMALL_MODELS: dict[str, SmallModel] = {
    "small-llama": SmallModel("full attention, 6 layers, 4 KV heads", _llama()),
    "small-llama-1h": SmallModel("full attention, one KV head, which every rank of tp2 holds", _llama(num_key_value_heads=1)),
    "small-mla": SmallModel("DeepSeek-V2, latent attention (MLA)", _mla(), kinds=("layers",), revision=2),
    "small-mla-128": SmallModel(
        "the same with heads of 128 channels, for which kernels of GPUs exist", _mla(qk_nope_head_dim=64), kinds=("layers",)
    ),
    "small-mistral": SmallModel(
        "sliding window of 128 tokens in every layer",
        _llama(architectures=["MistralForCausalLM"], model_type="mistral", num_hidden_layers=4, sliding_window=128),
    ),
    "small-llama4": SmallModel(
        "Llama 4: three layers with chunked local attention of 256 tokens, then a full one",
        _llama(
            architectures=["Llama4ForCausalLM"],
            model_type="llama4_text",
            num_hidden_layers=4,
            attention_chunk_size=256,
            intermediate_size_mlp=256,
            interleave_moe_layer_step=0,
            moe_layers=[],
        ),
    ),
    "small-gemma3": SmallModel(
        "Gemma 3: five layers with a sliding window, then a full one",
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            **_GQA,
            "num_hidden_layers": 6,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 128,
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "small-gptoss": SmallModel(
        "gpt-oss: sliding window and full attention in turns, sinks, experts",
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            **_GQA,
            "num_attention_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "hidden_act": "silu",
            "swiglu_limit": 7.0,
            "attention_bias": True,
        },
    ),
    "small-falcon-h1": SmallModel(
        "Falcon-H1: attention and Mamba 2 side by side in every layer",
        {
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            **_GQA,
            "head_dim": 64,
            "mamba_d_ssm": 256,
            **_MAMBA,
        },
        kinds=("heads", "layers", "state"),
        caches_prefixes=False,
    ),
    "small-granite4": SmallModel(
        "Granite 4: Mamba 2 and attention in turns",
        {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            **_GQA,
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "rope",
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 0.18,
            "logits_scaling": 1.0,
            **_MAMBA,
            **_ROPE,
        },
        kinds=("heads", "layers", "state"),
        caches_prefixes=False,
    ),
    "small-nemotron-h": SmallModel(
        "Nemotron-H: Mamba 2, attention and feed-forward layers",
        {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "M*M-",
            **_GQA,
            "head_dim": 64,
            "attention_head_dim": 64,
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 32,
            "conv_kernel": 4,
            "expand": 2,
            "chunk_size": 64,
            "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": 1e-5,
        },
        kinds=("heads", "layers", "state"),
        caches_prefixes=False,
    ),
    "small-mamba2": SmallModel(
        "Mamba 2 alone: nothing but state",
        {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "num_hidden_layers": 4,
            "num_heads": 8,
            "head_dim": 32,
            "state_size": 32,
            "expand": 2,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 64,
            "rms_norm": True,
            "layer_norm_epsilon": 1e-5,
            "use_conv_bias": True,
            "use_bias": False,
        },
        kinds=("layers", "state"),
        caches_prefixes=False,
    ),
    "small-ngram": SmallModel("small-llama with n-gram drafting, which has no cache", _llama(), draft="ngram"),
    "small-draft": SmallModel(
        "small-llama with a draft model: its first two layers",
        _llama(),
        kinds=_DRAFTS,
        draft="draft_model",
        draft_config={"num_hidden_layers": 2},
    ),
    "small-draft-8h": SmallModel(
        "small-llama with a draft model of another size of cache",
        _llama(),
        kinds=_DRAFTS,
        draft="draft_model",
        draft_config={"num_hidden_layers": 2, "num_key_value_heads": 8, "repeated_kv_heads": 2},
    ),
    "small-eagle": SmallModel(
        "small-llama with an EAGLE head", _llama(), kinds=_DRAFTS, draft="eagle", draft_config={"num_hidden_layers": 1}
    ),
    "small-mtp": SmallModel(
        "DeepSeek-V3: latent attention, and a layer behind the others that predicts a second token (MTP)",
        _mla(
            architectures=["DeepseekV3ForCausalLM"],
            model_type="deepseek_v3",
            num_nextn_predict_layers=1,
            # The layer of MTP, too, is without experts.
            first_k_dense_replace=5,
        ),
        kinds=("layers", "draft"),
        draft="mtp",
    ),
}
"""Every small model by its name."""

_SPECULATIVE = {
    "ngram": {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "draft_model": {"num_speculative_tokens": 3},
    "eagle": {"num_speculative_tokens": 2},
    "mtp": {"num_speculative_tokens": 1},
}


def is_small_model(name: str) -> bool:
    """Whether a name can only mean one of these."""
    return name.startswith(PREFIX) and os.sep not in name


def find_small_model(name: str) -> SmallModel:
    """The model of that name. Raises ModelError that names the nearest, or all."""
    if name not in SMALL_MODELS:
        raise ModelError(f"model {name!r} is no small model for vLLM; {nearest_known(name, SMALL_MODELS)}")
    return SMALL_MODELS[name]


@dataclass(frozen=True, slots=True)
class MadeModel:
    """A directory that vLLM can load, and what else its server has to be given."""

    directory: Path
    arguments: tuple[str, ...] = ()


def ensure_small_model(name: str, environment: VllmEnvironment, progress: Progress) -> MadeModel:
    """The model of that name in the cache directory, and its companion, written there first if need be."""
    model = find_small_model(name)
    own = "mtp" if model.draft == "mtp" else ""
    directory = _ensure(name, {**_COMMON, **model.config}, own, model.revision, environment, progress)
    arguments: tuple[str, ...] = () if model.caches_prefixes else ("--no-enable-prefix-caching",)
    if model.draft:
        speculative = {"method": model.draft, **_SPECULATIVE[model.draft]}
        if model.draft_config:
            config = {**_COMMON, **model.config, **model.draft_config}
            companion = _ensure(f"{name}.draft", config, model.draft, model.revision, environment, progress)
            speculative["model"] = str(companion)
        arguments += ("--speculative-config", json.dumps(speculative))
    if model.draft == "mtp":
        # On CPUs vLLM 0.32 turns chunked prefill off for MLA, yet keeps the smaller steps that it has set for the drafts: a
        # longer prompt would wait for ever.
        arguments += ("--max-num-batched-tokens", str(CONTEXT_TOKENS))
    return MadeModel(directory, arguments)


def _ensure(
    name: str, config: Mapping[str, Any], draft: str, revision: int, environment: VllmEnvironment, progress: Progress
) -> Path:
    directory = environment.directory / "models" / f"{name}-v{revision}"

    def write() -> None:
        progress(f"writing the weights of {name} (half a minute, once)")
        (directory / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config), indent=1))
        _write_tokenizer(directory)
        command = [str(environment.python), "-P", str(_SCRIPT), str(directory), draft]
        run_logged(command, directory / "write.log", f"writing {name}", _WRITE_S)

    do_once(directory / "written", f"writing {name}", _WRITE_S, write)
    return directory


def _write_tokenizer(directory: Path) -> None:
    from kvbaton.engines.embedded.tiny import byte_tokenizer

    files = byte_tokenizer()
    (directory / "tokenizer.json").write_text(files.tokenizer_json, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": files.bos_token,
        "eos_token": files.eos_token,
        "chat_template": files.chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
