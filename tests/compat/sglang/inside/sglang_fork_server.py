"""Imports SGLang once, and forks a server for every line on standard input; answers each with the process id.

A line is a JSON object: the `arguments` of `sglang.launch_server`, the `environment` of the server and the `output` that it
prints to. The servers fork their own processes too, where SGLang spawns them: each would import SGLang again, most of a start.
They end with this process, which ends with its standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import sys
from typing import Any

_PRELOADED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.disaggregation.prefill",
    "sglang.srt.disaggregation.decode",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.models.registry",
)
_PR_SET_PDEATHSIG = 1


def _serve(order: dict[str, Any]) -> None:
    """Become the server; does not return."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output, nothing = os.open(order["output"], os.O_WRONLY), os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, number)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["sglang.launch_server", *order["arguments"]]
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def main() -> None:
    """Fork servers until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Imports may print.
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):  # what cannot be imported ahead is imported by the server
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            _serve(json.loads(line))
            sys.exit(0)
        print(pid, file=answers, flush=True)


if __name__ == "__main__":
    main()
