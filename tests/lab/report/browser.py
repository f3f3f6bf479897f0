"""A real browser for tests: Chromium without a window, told what to do through two pipes.

The protocol is Chromium's own (DevTools), in messages of JSON that end with a zero byte, so no
driver has to be installed beside the browser.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0


def find_browser() -> str | None:
    """Path of a Chromium or Chrome: CHROME if it is set, else the first one there is."""
    told = os.environ.get("CHROME")
    return told or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A running browser; :meth:`start` gives one that ends with its block."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._buffer = 0, b""
        self.events: list[dict[str, Any]] = []

    @classmethod
    @contextlib.contextmanager
    def start(cls) -> Iterator[Browser]:
        path = find_browser()
        assert path is not None, "no browser"
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
            # The browser reads commands from descriptor 3 and answers on 4.
            script = 'in=$1; out=$2; shift 2; exec "$@" 3<&"$in" 4>&"$out"'
            process = subprocess.Popen(
                [
                    "bash", "-c", script, "browser", str(theirs_in), str(theirs_out), path,
                    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
                    "--hide-scrollbars", "--disable-extensions", "--no-first-run",
                    "--disable-dev-shm-usage", f"--user-data-dir={profile}", "about:blank",
                ],
                pass_fds=(theirs_in, theirs_out),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            os.close(theirs_in)
            os.close(theirs_out)
            browser = cls(ours_out, ours_in)
            try:
                yield browser
            finally:
                with contextlib.suppress(Exception):
                    browser.call("Browser.close")
                os.close(ours_out)
                os.close(ours_in)
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events on the way are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str, session: str) -> None:
        """Wait for an event of a session, unless it came already."""
        deadline = time.monotonic() + PATIENCE

        def came() -> bool:
            return any(
                event.get("method") == method and event.get("sessionId") == session
                for event in self.events
            )

        while not came():
            self.events.append(self._read(deadline, method))

    def _read(self, deadline: float, waiting_for: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select(
                [self._answers], [], [], max(0, deadline - time.monotonic())
            )
            assert ready, f"the browser did not answer {waiting_for} in {PATIENCE:.0f} s"
            chunk = os.read(self._answers, 1 << 20)
            assert chunk, f"the browser ended before it answered {waiting_for}"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page: str | Path, *, width: int, height: int, dark: bool = False) -> Tab:
        """Load a file in a window of this size, without a network."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.call("Network.emulateNetworkConditions", offline=True, latency=0,
                 downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        tab.call("Page.navigate", url=Path(page).resolve().as_uri())
        self.wait_for("Page.loadEventFired", session)
        return tab


class Tab:
    """A page in the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    @property
    def errors(self) -> list[str]:
        """Exceptions, console errors and warnings, and requests that left the file."""
        self.evaluate("0")  # what happened before has been told when this is answered
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            method, told = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(told["exceptionDetails"])[:500])
            if method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
                found.append(json.dumps(told["args"])[:500])
            if method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                found.append(told["entry"]["text"])
            if method == "Network.requestWillBeSent":
                url = told["request"]["url"]
                if not url.startswith(("file:", "data:", "about:")):
                    found.append(f"asks for {url}")
        return found

    def screenshot(self, path: str | Path) -> None:
        """The whole page as PNG."""
        size = self.evaluate(
            "[document.documentElement.clientWidth, document.documentElement.scrollHeight]"
        )
        clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(shot["data"]))
