"""Naming processes, and knowing that one is dead."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from kvbaton.core.card import ProcessId
from kvbaton.transport.neighbour import is_gone, this_process

NAME_ME = """
import sys
import msgspec
from kvbaton.transport.neighbour import this_process
print(msgspec.json.encode(this_process()).decode(), flush=True)
sys.stdin.read()
"""


def test_a_live_process_is_not_gone_and_a_dead_one_is() -> None:
    with subprocess.Popen([sys.executable, "-c", NAME_ME], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        name = msgspec.json.decode(child.stdout.readline(), type=ProcessId)
        assert name.host == this_process().host
        assert not is_gone(name)
        child.kill()
        child.wait(10)
        assert is_gone(name)


def test_a_recycled_pid_is_another_process() -> None:
    me = this_process()
    assert not is_gone(me)
    assert is_gone(msgspec.structs.replace(me, started=me.started + 1))


def test_nothing_is_known_of_other_hosts() -> None:
    me = this_process()
    assert not is_gone(msgspec.structs.replace(me, host="elsewhere", started=1))
    assert not is_gone(msgspec.structs.replace(me, host="", started=1))


def test_a_pid_that_no_process_can_have_is_gone() -> None:
    me = this_process()
    for pid in (-1, 0, 1 << 31, 1 << 62):
        assert is_gone(msgspec.structs.replace(me, pid=pid))
