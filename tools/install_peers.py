"""Install what the long suites run against (vLLM and SGLang for CPUs, routers of others), each in its own environment.

Their servers compile what they import, once for all, and convert the model. Both are done here, by one process: else the first
test that needs servers has three of them do it side by side, while it waits.
"""

from __future__ import annotations

from dataclasses import replace

from kvbaton.engines.base import EngineOptions, Progress
from kvbaton.engines.sglang.setup.plugin import SglangPlugin
from kvbaton.engines.vllm.setup.plugin import VllmPlugin
from kvbaton.errors import LocalError
from kvbaton.launch.installing import PeerEnvironment, do_once, run_logged
from kvbaton.launch.router_peers import ensure_router_peers

_IMPORT_S = 900.0
_IMPORT = """
import contextlib, importlib, sys

for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):  # of another release
        importlib.import_module(name)
"""
_VLLM = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)
_SGLANG = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.llama",
)


def _import_once(environment: PeerEnvironment, modules: tuple[str, ...], progress: Progress) -> None:
    """Have what servers import compiled. They do it themselves where this fails, so that is shown and no more."""

    def run() -> None:
        progress(f"importing {modules[0]}, and what its servers import beside it, so that it is compiled (only this once)")
        command = [str(environment.python), "-c", _IMPORT, *modules]
        run_logged(command, environment.directory / "install.log", "importing", _IMPORT_S, environment.variables())

    try:
        do_once(environment.directory / "imported", "importing", _IMPORT_S, run)
    except LocalError as error:
        progress(str(error))


def _install(progress: Progress) -> None:
    options = EngineOptions("smollm2", "local", 1)
    _import_once(VllmPlugin().prepare(replace(options, connector="moriio"), progress).environment, _VLLM, progress)
    _import_once(SglangPlugin().prepare(options, progress).environment, _SGLANG, progress)
    ensure_router_peers(progress)


if __name__ == "__main__":
    _install(print)
