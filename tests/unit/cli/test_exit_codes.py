"""Exit codes of the command line: 2 with one clear line, and never a traceback, for whatever cannot be run."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvbaton import __version__
from kvbaton.cli.main import main
from kvbaton.launch.ports import PortPicker


def _exit_code(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvbaton", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    return Refusal(monkeypatch, capsys)


class Refusal:
    """Runs a command that must exit with 2, and gives what it said on standard error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> str:
        assert _exit_code(self._monkeypatch, *arguments) == 2
        said = self._capsys.readouterr()
        assert said.out == ""
        assert "Traceback" not in said.err
        return said.err


def test_help_and_version_are_all_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(monkeypatch, "--version") == 0
    assert __version__ in capsys.readouterr().out
    assert _exit_code(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("up", "verify", "serve", "router", "bench"))


def test_a_mistake_of_our_own_is_not_taken_for_something_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("math domain error")

    monkeypatch.setattr("kvbaton.verify.run.run_verify", fail)
    assert _exit_code(monkeypatch, "verify", "--drop-writes") == 2
    assert "math domain error" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "verify", "serve", "router"])
def test_an_unknown_option_is_refused_by_name(refusal: Refusal, command: str) -> None:
    assert "--bogus" in refusal(command, "--bogus")


@pytest.mark.parametrize("command", ["engine", "handoff", "plan", "router", "serve", "wire"])
def test_a_place_for_results_that_is_not_there_is_refused_before_they_are_measured(refusal: Refusal, command: str) -> None:
    assert "--out is '/nowhere/at/all.json'" in refusal("bench", command, "--out", "/nowhere/at/all.json")


def test_keys_that_are_none_let_nobody_in(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as those of a list whose parts were not set."""
    monkeypatch.setenv("KVBATON_API_KEY", ",")
    assert "KVBATON_API_KEY is ','" in refusal("router")


def test_an_unknown_command_is_refused_by_name(refusal: Refusal) -> None:
    assert "frobnicate" in refusal("frobnicate")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("verify", "--transport", "pigeon"), "pigeon"),
        (("verify", "--requests", "many"), "many"),
        (("verify", "--requests", "0"), "--requests is 0"),
        (("verify", "--concurrency", "-1"), "--concurrency is -1"),
        (("verify", "--longest-prompt", "0"), "--longest-prompt is 0"),
        (("up", "--prefill", "0"), "--prefill is 0"),
        (("up", "--decode", "-2"), "--decode is -2"),
        (("up", "--restarts", "-1"), "--restarts is -1"),
        (("up", "--ray", "--encrypt"), "replicas of Ray are not encrypted so far"),
        (("up", "--port", "99999"), "--port is 99999"),
        (("serve", "--role", "onlooker"), "onlooker"),
        (("serve", "--port", "0"), "--port is 0"),
        (("serve", "--control-port", "70000"), "--control-port is 70000"),
        (("serve", "--threads", "0"), "--threads is 0"),
        (("serve", "--model", "tiny", "--transfer-timeout", "60", "--defer-timeout", "60"), "defer_timeout (60 s)"),
        (("router", "--port", "70000"), "port is 70000"),
        (("router", "--port", "12345", "--discovery-port", "12345"), "12345"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(refusal: Refusal, arguments: tuple[str, ...], named: str) -> None:
    assert named in refusal(*arguments)


@pytest.mark.parametrize("command", ["up", "verify", "serve"])
def test_a_missing_model_is_refused_by_path(refusal: Refusal, command: str, tmp_path: Path) -> None:
    path = tmp_path / "nowhere.gguf"
    port = str(PortPicker().pick())
    arguments = () if command == "verify" else ("--port", port)
    said = refusal(command, "--model", str(path), *arguments)
    assert f"error: model '{path}' does not exist" in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100])
def test_a_broken_model_file_is_refused_by_path(refusal: Refusal, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    assert str(path) in refusal("verify", "--model", str(path))


def test_an_empty_model_directory_is_refused_by_path(refusal: Refusal, tmp_path: Path) -> None:
    assert str(tmp_path) in refusal("verify", "--model", str(tmp_path))


def test_a_port_in_use_is_refused_by_number(refusal: Refusal) -> None:
    ports = PortPicker()
    taken, free = ports.pick(), ports.pick()
    with socket.create_server(("127.0.0.1", taken)):
        for arguments in (
            ("up", "--model", "tiny", "--port", str(taken)),
            ("router", "--port", str(taken), "--discovery-port", str(free)),
            ("router", "--port", str(free), "--discovery-port", str(taken)),
            ("serve", "--model", "tiny", "--port", str(taken), "--control-port", str(free)),
            ("serve", "--model", "tiny", "--port", str(free), "--control-port", str(taken)),
        ):
            said = refusal(*arguments)
            assert str(taken) in said
            assert "in use" in said


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--exhaustive", "--seed", "1"), "--exhaustive"),
        (("--exhaustive", "--script", "{}"), "--exhaustive"),
        (("--seed", "1", "--script", "{}"), "give one of them"),
        (("--replay",), "--seed or --script"),
        (("--script", "{}"), "not a script"),
        (("--seeds", "0"), "--seeds is 0"),
        (("--plant", "nonsense"), "unknown plant 'nonsense'"),
        (("--exchange", "--plant", "own-count"), "with --exchange use late-store"),
        (("--plant", "late-store", "--exhaustive"), "by their seeds alone"),
    ],
)
def test_sim_refuses_what_makes_no_sense(refusal: Refusal, arguments: tuple[str, ...], word: str) -> None:
    assert word in refusal("sim", *arguments)


def test_sim_tells_how_a_run_went_by_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(monkeypatch, "sim", "--seed", "0") == 0
    assert "1 run," in capsys.readouterr().out
    assert _exit_code(monkeypatch, "sim", "--seed", "0", "--plant", "mapping-dropped") == 1
    assert "--plant mapping-dropped --replay --script" in capsys.readouterr().out
    assert _exit_code(monkeypatch, "sim", "--list-plants") == 0


def test_sim_finds_the_mistakes_of_the_exchange(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(monkeypatch, "sim", "--plant", "late-store") == 1
    assert "a byte changed after the memory was withdrawn" in capsys.readouterr().out
    assert _exit_code(monkeypatch, "sim", "--plant", "early-notice", "--json") == 1
    assert "a notice is here before the bytes" in capsys.readouterr().out
    assert _exit_code(monkeypatch, "sim", "--exchange", "--seeds", "2") == 0
    assert "every rule held" in capsys.readouterr().out


def test_serve_wants_two_ports(refusal: Refusal) -> None:
    assert "give each its own" in refusal("serve", "--port", "12345", "--control-port", "12345")


def test_a_peer_to_compare_with_makes_vllm_the_engine(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--lengths is" in refusal("bench", "serve", "--peer", "nixl", "--lengths", "0")
    monkeypatch.setattr("kvbaton.bench.servers.available_memory_bytes", lambda: 1)
    assert "7 vLLM servers at once need" in refusal("bench", "serve", "--peer", "nixl")
    assert "3 vLLM servers at once need" in refusal("bench", "serve", "--engine", "vllm", "--mode", "push")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--peers", "0"], "peers is 0; .*1 to 64"),
        (["--peers", "1,-1"], "peers is 1, -1; .*1 to 64"),
        (["--peers", "65"], "peers is 65; .*1 to 64"),
        (["--blocks", "4,0"], "block_bytes is 4096, 0 .*above 0"),
        (["--out", "missing/wire.json"], "--out is 'missing/wire.json', which cannot be written"),
        (["--plot", "missing/wire"], "--plot is 'missing/wire', which cannot be written"),
        (["--plot", "wire-0.1"], "--plot is 'wire-0.1'; its suffix must be"),
    ],
)
def test_what_bench_wire_cannot_do_is_said_before_it_measures(refusal: Refusal, options: list[str], words: str) -> None:
    assert re.search(words, refusal("bench", "wire", *options))


@pytest.mark.parametrize("options", [["--transport", "nixl"], ["--transport", "nixl", "--direction", "write"]])
def test_a_bench_wire_that_measured_nothing_is_not_all_well(
    refusal: Refusal, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    for library in ("nixl", "nixl._api", "mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, library, None)
    assert "could be measured here" in refusal("bench", "wire", *options, "--blocks", "4", "--batch-mib", "1", "--idle", "0")


FULL = [
    ("router --port 99999 2> /dev/full", 2),
    ("no-such-command 2> /dev/full", 2),
    ("sim --seeds 1 2> /dev/full", 0),
    ("sim --seeds 1 > /dev/full", 2),
    ("sim --seeds 1 --json > /dev/full", 2),
    ("sim --seeds 1 > /dev/full 2> /dev/full", 2),
    ("--version > /dev/full", 2),
    ("sim --help | true", 0),
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(("line", "code"), FULL)
def test_a_full_disk_changes_no_code_and_prints_no_traceback(line: str, code: int) -> None:
    """Python itself would exit with 1, which means that something was found, or with 120."""
    command = " ".join((sys.executable, "-m", "kvbaton.cli.main", line))
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
