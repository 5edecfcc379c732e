"""Run Python where Ray Serve is, installed on first use: `python tools/in_ray.py -m pytest tests/compat/ray_serve`.

Ray pins few packages but brings many, so that it has an environment of its own, kept for all checkouts; the code is this one's.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

from kvbaton.launch.installing import PeerEnvironment, default_cache_dir

_RAY_VERSION = "2.60.0"
_FOR_TESTS = ("hypothesis", "pytest", "pytest-timeout")


def ensure_ray() -> PeerEnvironment:
    """The environment, installed first if need be. Raises LocalError with the last lines of pip."""
    environment = PeerEnvironment.named(default_cache_dir(), f"ray-{_RAY_VERSION}")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [each for each in (*project["dependencies"], *extras["router"], *extras["embedded"]) if "[" not in each]

    def report(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    def install() -> None:
        environment.make(report)
        environment.pip("installing Ray Serve", report, "install", f"ray[serve]=={_RAY_VERSION}", *needed, *_FOR_TESTS)

    environment.install_once("installed", f"Ray Serve {_RAY_VERSION}", "about 250 MB, three minutes", report, install)
    environment.link_kvbaton("")
    return environment


if __name__ == "__main__":
    ray = ensure_ray()
    # Not set in the environment of this repository's other commands: Ray would report what is used to its makers. And Serve
    # kills an HTTP proxy that is not ready after 5 s, which a busy machine needs to import it; the start then fails.
    variables = {**ray.variables(), "RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
    os.execve(ray.python, [str(ray.python), *sys.argv[1:]], {**os.environ, **variables})  # noqa: S606
