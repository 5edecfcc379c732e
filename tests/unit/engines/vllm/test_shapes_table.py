"""The table of shapes in docs/vllm.md is that of the kept log."""

from __future__ import annotations

import msgspec
from shapes_table import LOG, PAGE, regenerated


def test_the_page_has_what_the_log_has() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert regenerated(text, msgspec.json.decode(LOG.read_bytes())) == text, "run: python tools/shapes_table.py"


def test_a_case_works_only_with_its_control() -> None:
    case, page = "[llama-pp2,tp2-tp1-push]", "<!-- begin shapes -->\n<!-- end shapes -->"
    names = [f"test_vllm_shapes::test_{part}{case}" for part in ("same", "control")]
    names += [name.replace("push", "pull") for name in names]
    results = ["passed", "passed", "passed", "failure"]
    tests = [{"test": name, "result": result} for name, result in zip(names, results, strict=True)]
    text = regenerated(page, {"tests": tests, "not_run": []})
    assert "| `small-llama` | `pp2,tp2` → `tp1` | **works** | **fails** |" in text
    text = regenerated(page, {"tests": tests[:1], "not_run": names[1:]})
    assert "| *not run* | *not run* |" in text
