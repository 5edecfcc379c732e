"""The shapes and models of the matrix, and how one case is run: `kvbaton verify`, with real processes."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from kvbaton.launch.local import kvbaton_command

SHAPES = [
    ("tiny-gqa8", "tp2", "tp4"),
    ("tiny-gqa8", "tp4", "tp2"),
    ("tiny-gqa8", "tp4", "tp1"),
    ("tiny-gqa6", "tp3", "tp2"),
    ("tiny-gqa2", "tp1", "tp4"),
    ("tiny-gqa4", "tp2", "tp8"),
    ("tiny-gqa8", "pp2", "pp1"),
    ("tiny-gqa8", "pp1", "pp2"),
    ("tiny-gqa8", "pp2,tp2", "tp4"),
    ("tiny-gqa8", "tp4", "pp2,tp2"),
]
OTHERS = [
    (model, prefill, decode)
    for model in ("tiny-gqa2", "tiny-gqa4", "tiny-mqa", "tiny-mla", "tiny-swa", "tiny-mamba", "tiny-nsa")
    for prefill, decode in (("tp2", "tp4"), ("tp4", "tp1"), ("pp1", "pp2"), ("pp2,tp2", "tp4"))
]
VARIANTS = [
    ("tiny-gqa2:1", "tp2", "tp1", ("--cache-dtype", "float16")),
    ("tiny-mamba:7@conv_taps=6", "tp1", "tp2", ("--cache-dtype", "float16")),
    ("tiny-mla@latent_size=32", "tp2", "pp2", ()),
    ("tiny-gqa8", "tp2", "tp4", ("--transport", "tcp")),
    ("tiny-swa", "tp4", "pp2,tp2", ("--integrity", "full")),
    ("tiny-gqa4", "tp2", "tp8", ("--integrity", "sampled", "--mode", "pull")),
    ("tiny-mamba", "tp4", "pp2", ("--transport", "tcp")),
]
CONTROLS = [
    ("tiny-mamba", "tp2", "tp4", "conv"),
    ("tiny-mamba", "tp4", "pp2", "ssm"),
    ("tiny-swa", "pp2", "tp2", "sliding"),
    ("tiny-nsa", "tp2", "tp1", "index"),
    ("tiny-mla", "tp2", "tp4", "mla"),
    ("tiny-gqa8", "pp2", "tp2", "layer:3"),
    ("tiny-gqa8", "tp4", "pp2", "layer:1"),
    ("tiny-gqa8", "tp2", "tp4", "head:5"),
    ("tiny-gqa4", "tp2", "tp8", "head:2"),
]


def verify(model: str, prefill: str, decode: str, *more: str, requests: int = 6) -> tuple[int, dict[str, Any]]:
    """Run one case; its exit code and report. Prompts are of very different lengths, more than one chunk among them."""
    run = verify_text(model, prefill, decode, *more, requests=requests)
    assert run.stdout, run.stderr
    document: dict[str, Any] = json.loads(run.stdout)
    return run.returncode, document


def verify_text(model: str, prefill: str, decode: str, *more: str, requests: int = 6) -> subprocess.CompletedProcess[str]:
    """Run one case; its exit code and everything that it printed."""
    shapes = ("--prefill-shape", prefill, "--decode-shape", decode)
    short = ("--requests", str(requests), "--longest-prompt", "400", "--max-tokens", "6")
    command = kvbaton_command("verify", "--json", "--model", model, *shapes, *short, *more)
    return subprocess.run(command, capture_output=True, timeout=500, text=True)


def check_all_well(code: int, document: dict[str, Any]) -> None:
    """Every answer is the same, every request was handed off, and moved what was planned."""
    assert code == 0, document["problems"]
    assert document["handed_off"] == document["requests"]
    assert (document["recomputed"], document["failed"], document["different"]) == (0, 0, 0)
    assert document["bytes_moved"] == document["bytes_planned"] > 0
