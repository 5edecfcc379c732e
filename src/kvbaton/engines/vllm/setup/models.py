"""Models for vLLM and SGLang: a directory of safetensors as it is, or a GGUF file converted once, by the engine's Python."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvbaton.engines.base import Progress
from kvbaton.errors import ModelError
from kvbaton.launch.installing import PeerEnvironment, do_once, run_logged

__all__ = ["ensure_model"]

_CONVERT_S = 1800.0
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


def ensure_model(path: Path, environment: PeerEnvironment, progress: Progress, title: str = "vLLM") -> Path:
    """A directory that the engine can load; a .gguf file is converted first, once, by the transformers in `environment`."""
    if path.is_dir():
        return path
    if path.suffix != ".gguf":
        raise ModelError(f"model {path}: {title} is given directories of safetensors, or .gguf files; this is neither")
    stat = path.stat()
    digest = hashlib.blake2b(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=6).hexdigest()
    target = environment.directory / "models" / f"{path.stem}-{digest}"

    def convert() -> None:
        progress(f"converting {path.name} for {title} (about a minute, once)")
        command = [str(environment.python), "-c", _CONVERT, str(path.parent), path.name, str(target)]
        run_logged(command, target / "convert.log", f"converting {path.name} for {title}", _CONVERT_S, environment.variables())

    do_once(target / "converted", f"converting {path.name}", _CONVERT_S, convert)
    return target
