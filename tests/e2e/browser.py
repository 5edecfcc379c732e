"""A real browser, driven through the pipe of its own debugging protocol: what a page shows, asks for and complains about."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from watching import wait_until

__all__ = ["Page", "browser", "find_browser"]

_ANSWER_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_KEYS = {"Enter": 13, "Tab": 9, " ": 32}
_SWITCHES = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--no-sandbox",  # which needs user namespaces, and root may not have it at all
)  # fmt: skip


def find_browser() -> str | None:
    """Chromium or Chrome of this machine; on Debian `apt-get install chromium`."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Page:
    """One page. Events of the browser are collected by a thread of its own."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._lock = threading.Lock()
        self._number = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._session = ""
        self.requested: list[str] = []
        """The URL of everything that it asked for."""
        self.complaints: list[str] = []
        """What it threw, and what the browser refused it."""
        self._instead: dict[str, bytes] = {}
        threading.Thread(target=self._read, name="browser", daemon=True).start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call the browser, and wait for its answer."""
        number = self._post(method, params)
        wait_until(lambda: number in self._answers, f"the browser answers {method}", _ANSWER_S)
        answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'", f"{url} is loaded")

    def run(self, script: str) -> Any:
        """What an expression is, there."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (script, answer)
        return answer["result"].get("value")

    def wait(self, script: str, what: str, timeout_s: float = _ANSWER_S) -> None:
        """Wait until an expression is true."""
        wait_until(lambda: bool(self.run(script)), what, timeout_s)

    def write(self, text: str) -> None:
        """Type where the cursor is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key."""
        what = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key], "text": {"Enter": "\r", " ": " "}.get(key, "")}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **what)

    def click(self, selector: str) -> None:
        """Click into the middle of an element, as a mouse does."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.run(f"(() => {{ const box = {box}; return [box.x + box.width / 2, box.y + box.height / 2]; }})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def answer_instead(self, path: str, content: bytes) -> None:
        """Answer the next request for `path` with server-sent events of this content, without the server."""
        self._instead[path] = content
        self.call("Fetch.enable", patterns=[{"urlPattern": f"*{path}"}])

    def picture(self, path: Path) -> None:
        """Keep what it looks like."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _post(self, method: str, params: dict[str, Any]) -> int:
        with self._lock:
            self._number += 1
            session = {"sessionId": self._session} if self._session else {}
            message = {"id": self._number, "method": method, "params": params, **session}
            os.write(self._send, json.dumps(message).encode() + b"\0")
            return self._number

    def _read(self) -> None:
        pending = b""
        with suppress(OSError):
            while piece := os.read(self._receive, 1 << 20):
                *whole, pending = (pending + piece).split(b"\0")
                for each in whole:
                    self._take(json.loads(each))

    def _take(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case None:
                self._answers[message["id"]] = message
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["source"] in ("security", "violation", "javascript"):
                self.complaints.append(params["entry"]["text"])
            case "Fetch.requestPaused":
                # Not `call`: this is the thread that would receive the answer.
                path = params["request"]["url"].partition("://")[2].partition("/")[1:]
                content = self._instead.pop("".join(path), None)
                if content is None:
                    self._post("Fetch.continueRequest", {"requestId": params["requestId"]})
                    return
                headers = [{"name": "Content-Type", "value": "text/event-stream"}]
                body = base64.b64encode(content).decode()
                given = {"requestId": params["requestId"], "responseCode": 200, "responseHeaders": headers, "body": body}
                self._post("Fetch.fulfillRequest", given)


@contextmanager
def browser(make: Callable[[int, int], Page] = Page) -> Iterator[Page]:
    """A browser with one page, in a profile of its own; both are gone afterwards."""
    name = find_browser()
    assert name is not None
    to_browser, ours = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="kvbaton-browser-", ignore_cleanup_errors=True) as profile:
        # The protocol is on descriptors 3 and 4, whatever else is open.
        shell = f'exec 3<&{to_browser[0]} 4>&{ours[1]}; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", shell, "browser", name, *_SWITCHES, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser[0], ours[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser[0])
        os.close(ours[1])
        try:
            yield make(to_browser[1], ours[0])
        finally:
            os.close(to_browser[1])  # the browser ends with its pipe
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(15)
            os.close(ours[0])
