"""Entry point of the `kvbaton` command: exit code 0 all well, 1 the thing checked for was found, 2 it could not be run."""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback

import cyclopts
from cyclopts import App
from rich.console import Console

from kvbaton import __version__
from kvbaton.cli.bench import bench_app
from kvbaton.cli.config import config_app
from kvbaton.cli.doctor import doctor
from kvbaton.cli.explain import explain
from kvbaton.cli.keys import keys
from kvbaton.cli.output import flush_outputs
from kvbaton.cli.router import router
from kvbaton.cli.serve import serve
from kvbaton.cli.sim import sim
from kvbaton.cli.up import up
from kvbaton.cli.verify import verify
from kvbaton.errors import KVBatonError

__all__ = ["main"]

COULD_NOT_RUN = 2
INTERRUPTED = 130


def make_app() -> App:
    """The command line with all its commands."""
    app = App(
        name="kvbaton",
        help="Hands the KV cache of a language model from a prefill instance to a decode instance.",
        version=__version__,
    )
    for command in (up, verify, sim, serve, router, explain, doctor, keys, bench_app, config_app):
        app.command(command)
    return app


def main() -> None:
    """Run one command and exit with its code; every failure is one clear line on standard error.

    A bug of our own is shown with its traceback. It must not exit as Python does: 1 means that something was found. Neither may
    an output that takes no more bytes change the code: without its answer, a command could not be run.
    """
    code = _run()
    if not flush_outputs() and code == 0:
        code = COULD_NOT_RUN
    sys.exit(code)


def _run() -> int:
    console = Console(stderr=True)
    try:
        code = make_app()(sys.argv[1:], print_error=True, exit_on_error=False, error_console=console)
        return code if isinstance(code, int) else 0
    except cyclopts.CycloptsError:
        return COULD_NOT_RUN
    except KVBatonError as error:
        _print_error(console, str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EPIPE):
            _print_error(console, f"the output, or a file, takes no more: {error.strerror}")
        else:
            with contextlib.suppress(OSError):
                traceback.print_exc()
    return COULD_NOT_RUN


def _print_error(console: Console, text: str) -> None:
    with contextlib.suppress(OSError):
        console.print("error:", style="bold red", end=" ")
        console.print(text, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
