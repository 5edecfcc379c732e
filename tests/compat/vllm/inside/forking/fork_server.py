"""Imports vLLM once, and forks a server for every line on standard input; answers each with the process id.

A line is a JSON object: the `arguments` of `vllm`, the `environment` of the server and the path of its `log`. The servers end
with this process, which ends with its standard input.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Any

import setproctitle

_PRELOADED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)
_PR_SET_PDEATHSIG = 1


def _serve(order: dict[str, Any]) -> None:
    """Become the server; does not return."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, number)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["vllm", *order["arguments"]]
    from vllm.entrypoints.cli.main import main as serve

    sys.exit(serve())


def main() -> None:
    """Fork servers until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Imports may print.
    for name in _PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # of another release
            importlib.import_module(name)
    setproctitle.getproctitle()  # Finds where the title is kept while the environment is still beside it.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            _serve(json.loads(line))
        print(pid, file=answers, flush=True)


if __name__ == "__main__":
    main()
