"""`kvbaton doctor`: exit code 0 when what needs nothing else works, and every transport in the table, with its problem."""

from __future__ import annotations

import json
import sys

import pytest

from kvbaton.cli.main import main
from kvbaton.transport import trial
from kvbaton.transport.table import TRANSPORTS, variant_of
from kvbaton.transport.trial import Trial

KINDS = tuple(variant.kind for entry in TRANSPORTS.values() for variant in entry.variants)


class Doctor:
    """Runs the command on a machine where only some kinds work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str, working: tuple[str, ...]) -> tuple[int, str]:
        self._monkeypatch.setattr(
            trial,
            "try_transport",
            lambda kind: Trial(kind, "" if kind in working else f"no {kind} [here]", variant_of(kind)[0].stands_alone),
        )
        self._monkeypatch.setattr(sys, "argv", ["kvbaton", "doctor", *arguments])
        self._monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return caught.value.code, self._capsys.readouterr().out


@pytest.fixture
def run_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(monkeypatch, capsys)


@pytest.mark.parametrize(
    ("working", "code"),
    [
        (("local, shared memory",), 0),
        (("local, process_vm_readv",), 0),
        (("tcp",), 0),
        (KINDS, 0),
        (("cuda", "nixl", "mooncake", "mori"), 1),
        ((), 1),
    ],
)
def test_the_exit_code_says_whether_local_or_tcp_works(run_doctor: Doctor, working: tuple[str, ...], code: int) -> None:
    found, shown = run_doctor("--json", working=working)
    document = json.loads(shown)
    assert found == code
    assert document["ok"] is (code == 0)
    assert document["command"] == "doctor"
    assert [row["transport"] for row in document["transports"]] == list(KINDS)
    assert [row["transport"] for row in document["transports"] if row["works"]] == [kind for kind in KINDS if kind in working]


def test_the_table_shows_what_is_wrong(run_doctor: Doctor) -> None:
    code, shown = run_doctor(working=("tcp",))
    assert code == 0
    assert all(f"no {kind} [here]" in shown for kind in KINDS if kind != "tcp")
    assert "no tcp [here]" not in shown
