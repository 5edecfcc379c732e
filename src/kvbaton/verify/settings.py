"""What a verification compares, and how much of it. Light: the command line reads its options off this class."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvbaton.errors import ConfigError

__all__ = ["VerifySettings"]

_FEWEST_TOKENS = 2


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """What to verify.

    Parameters
    ----------
    requests
        how many requests.
    concurrency
        how many at a time.
    model
        `smollm2`, `tiny`, a .gguf file, a directory of Hugging Face safetensors, or a small model such as `tiny-mamba`; see
        `kvbaton serve --help`. vLLM has small models of its own, such as `small-llama`; see docs/vllm.md.
    prefill
        how many prefill instances.
    decode
        how many decode instances.
    max_tokens
        tokens per answer, at least 2: the first one does not depend on the cache that was handed over.
    longest_prompt
        prompt lengths are drawn from `shortest_prompt` to this many tokens, log-uniformly.
    seed
        of the prompts.
    drop_writes
        the control: move no bytes, leave the poison in. Must exit with 1.
    prefill_shape
        how the prefill instances are cut: `tp2`, `pp2,tp2`, `dp2`, ...; with the embedded engine for the small models only.
    decode_shape
        how the decode instances are cut.
    drop
        a control: leave one thing out of every hand-off, and the poison in: `conv`, `ssm`, `sliding`, `index`, `mla`,
        `full`, `layer:N` or `head:N`; with vLLM `heads`, `layers`, `state`, `draft` or `writes`. Must exit with 1.
    decode_model
        a control: another model for the decode instances, or other sizes of it as in `tiny-mamba@conv_taps=6`. They must
        refuse, with exit code 2.
    cache_dtype
        type of the numbers in all caches: `float32`; `float16` for the small models and vLLM; `bfloat16` for vLLM.
    decode_cache_dtype
        a control: another type for the decode instances. They must refuse, with exit code 2.
    device
        where the engines run: `cpu`, or `cuda` for vLLM on an NVIDIA GPU that all of them share.
    engine_arguments
        more arguments for the command line of every engine, as one string.
    shortest_prompt
        see `longest_prompt`.
    whole_blocks
        for caches of 8 and 16 bits, whose kernels round differently in prefill and in decode: prompts are one token longer
        than a number of blocks of so many tokens, and the single instance is asked twice. Its second answer counts: with the
        prompt in its prefix cache it computes the last token as a decode instance does. 0: it is asked once.
    connector
        which connector moves caches: `kvbaton`, or one that the engine ships and that runs on the drop-in for MoRI: `moriio`
        of vLLM, `mori` of SGLang.
    decode_lacks
        a control: what the cards of the decode instances leave out: `layer:N` or `rank:N`. They must be refused, with exit
        code 2.
    pair_url
        address of a router that runs already, with its instances; nothing is started then. Give `single_url` too.
    single_url
        address of one instance of the same model that runs already.
    """

    model: str = "smollm2"
    requests: int = 40
    concurrency: int = 8
    prefill: int = 1
    decode: int = 1
    max_tokens: int = 16
    longest_prompt: int = 1500
    seed: int = 0
    drop_writes: bool = False
    prefill_shape: str = "tp1"
    decode_shape: str = "tp1"
    drop: str = ""
    decode_model: str = ""
    cache_dtype: str = "float32"
    decode_cache_dtype: str = ""
    decode_lacks: str = ""
    device: str = "cpu"
    engine_arguments: str = ""
    shortest_prompt: int = 1
    whole_blocks: int = 0
    connector: str = "kvbaton"
    pair_url: str = ""
    single_url: str = ""

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency", "prefill", "decode", "max_tokens", "shortest_prompt", "longest_prompt"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if self.whole_blocks < 0:
            raise ConfigError(f"--whole-blocks is {self.whole_blocks}; it must be the tokens of a block, or 0")
        if self.whole_blocks >= self.longest_prompt:
            raise ConfigError(
                f"--whole-blocks is {self.whole_blocks} and --longest-prompt {self.longest_prompt}; one block and one token "
                "more have to fit"
            )
        if self.max_tokens < _FEWEST_TOKENS:
            raise ConfigError(
                f"--max-tokens is {self.max_tokens}; it must be at least {_FEWEST_TOKENS}: the first token is the prefill "
                "instance's own, and does not depend on the cache that was handed over"
            )
        self._check_running()

    def _check_running(self) -> None:
        if bool(self.pair_url) != bool(self.single_url):
            raise ConfigError("--pair-url and --single-url belong together: one is compared with the other")
        for name in ("pair_url", "single_url"):
            url = getattr(self, name)
            if url and not url.startswith(("http://", "https://")):
                raise ConfigError(f"--{name.replace('_', '-')} is {url!r}; give an address such as http://10.0.0.1:8000")
        for name in ("drop_writes", "drop", "decode_model", "decode_cache_dtype", "decode_lacks"):
            if self.pair_url and getattr(self, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} has no effect on instances that run already; start them with the control"
                )

    @property
    def engines(self) -> int:
        """How many engines share the cores of this machine: those of the pair, and the single one."""
        return self.prefill + self.decode + 1

    def shown(self) -> dict[str, str | int | bool]:
        """Every setting by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
