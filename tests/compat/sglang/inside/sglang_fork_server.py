"""Imports SGLang once, and forks a server for every line on standard input; answers each with the process id.

A line is a JSON object: the `arguments` of `sglang.launch_server`, the `environment` of the server and the `output` that it
prints to. The servers fork their own processes too, where SGLang spawns them: each would import SGLang again, most of a start.
They end with this process, which ends with its standard input.

Two things that SGLang does on GPUs and not on CPUs are added: `_read_windows` and `_share_heads`.
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
from types import SimpleNamespace
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
_SHARES_HEADS = "KVBATON_TEST_SHARES_HEADS"


def _read_windows() -> None:
    """SGLang's attention for CPUs writes windows to the slots of their own pool, and reads them at those of the whole cache."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def reading(forward: Any) -> Any:
        def read(self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
            pool, tokens = self.token_to_kv_pool, self.req_to_token_pool
            if not self.use_sliding_window_kv_pool or not pool.layers_mapping[layer.layer_id][1]:
                return forward(self, q, k, v, layer, *args, **kwargs)
            slots = pool.translate_loc_from_full_to_swa(tokens.req_to_token.long())
            self.req_to_token_pool = SimpleNamespace(req_to_token=slots)
            try:
                return forward(self, q, k, v, layer, *args, **kwargs)
            finally:
                self.req_to_token_pool = tokens

        return read

    for name in ("forward_extend", "forward_decode"):
        setattr(TorchNativeAttnBackend, name, reading(getattr(TorchNativeAttnBackend, name)))


def _share_heads() -> None:
    """Where there are more ranks than heads, several have the same one. On CPUs SGLang adds heads of zeros instead."""
    from sglang.srt.model_executor import model_runner

    adjust = model_runner.adjust_config_with_unaligned_cpu_tp

    def share(model_config: Any, load_config: Any, tp_size: int) -> Any:
        heads = model_config.get_total_num_kv_heads()
        return adjust(model_config, load_config, heads if tp_size % heads == 0 else tp_size)

    model_runner.adjust_config_with_unaligned_cpu_tp = share


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
    _read_windows()
    if os.environ.get(_SHARES_HEADS):
        _share_heads()
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
