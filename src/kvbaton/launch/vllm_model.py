"""Models for vLLM: a directory of safetensors as it is, or a GGUF file converted once into one, in vLLM's own environment."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

from kvbaton.errors import LocalError, ModelError
from kvbaton.launch.vllm_environment import VllmEnvironment

__all__ = ["ensure_model"]

_CONVERT_S = 1800.0
_KEPT_LINES = 10
_CONVERT = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

directory, name, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, quantization_config=GgufConfig(dequantize=True))
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(target)
AutoTokenizer.from_pretrained(directory, gguf_file=name).save_pretrained(target)
"""


def ensure_model(path: Path, environment: VllmEnvironment, say: Callable[[str], None]) -> Path:
    """A directory that vLLM can load; a .gguf file is converted first, once."""
    if path.is_dir():
        return path
    if path.suffix != ".gguf":
        raise ModelError(f"model {path}: vLLM is given directories of safetensors, or .gguf files to convert; this is neither")
    stat = path.stat()
    digest = hashlib.blake2b(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=6).hexdigest()
    target = environment.directory / "models" / f"{path.stem}-{digest}"
    if not (target / "converted").exists():
        say(f"converting {path.name} for vLLM (about a minute, once)")
        _convert(path, target, environment)
        (target / "converted").touch()
    return target


def _convert(path: Path, target: Path, environment: VllmEnvironment) -> None:
    target.mkdir(parents=True, exist_ok=True)
    command = [str(environment.python), "-c", _CONVERT, str(path.parent), path.name, str(target)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_CONVERT_S, check=False)
    if result.returncode:
        last = "\n".join(f"  {line}" for line in result.stderr.splitlines()[-_KEPT_LINES:])
        raise LocalError(f"{path.name} could not be converted for vLLM:\n{last}")
