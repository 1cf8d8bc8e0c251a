"""Debian's chromium, headless, driven through its debugging pipe: no port, and no driver to install."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
from copy import copy
from pathlib import Path
from typing import Any

from helpers import DEADLINE, eventually

CHROMIUM = os.environ.get("FTCOORD_TEST_CHROMIUM") or shutil.which("chromium") or ""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
HEARD = {"Page.javascriptDialogOpening", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}


class Browser:
    """One page of a browser that has just been installed.

    Args:
        profile: an empty folder.
    """

    def __init__(self, profile: Path) -> None:
        from_us, to_it = os.pipe()
        from_it, to_us = os.pipe()
        # It reads from descriptor 3 and writes to 4. High ones are moved there, so that neither is in the other's way.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (from_us, to_us)]
        moved = f'exec "$@" 3<&{high[0]} 4>&{high[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, "bash", CHROMIUM, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=high,
            stderr=subprocess.DEVNULL,
        )
        for fd in (from_us, to_us, *high):
            os.close(fd)
        self._out, self._in = os.fdopen(to_it, "wb", 0), os.fdopen(from_it, "rb")
        self._ids, self._session, self._left = itertools.count(1), "", bytearray()
        self.said: list[str] = []
        """What the page wrote into its console, dialogs it opened, errors in it."""
        self._attach()

    def _attach(self) -> None:
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def tab(self) -> Browser:
        """Another page of the same browser, which that one closes. For the same thread."""
        tab = copy(self)
        tab._attach()
        return tab

    def close(self) -> None:
        self._session = ""
        self._call("Browser.close")
        self._process.wait(DEADLINE)
        self._out.close()
        self._in.close()

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """What is shown there; empty if there is nothing such."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def shows(self, text: str, selector: str = "body") -> None:
        """Wait until the page shows a text."""
        eventually(lambda: text in self.text(selector), lambda: f"{text!r} is shown in {self.text(selector)!r}")

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, text: str) -> None:
        self.run(
            f"{{ const input = document.querySelector({json.dumps(selector)}); input.value = {json.dumps(text)};"
            " input.dispatchEvent(new Event('input')); }"
        )

    def front(self) -> None:
        """Have this page in sight, and not the other tabs."""
        self._call("Page.bringToFront")

    def look(self, width: int, height: int, scheme: str) -> None:
        """Have a screen of this size, and a user who wants it light or dark."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        session = {"sessionId": self._session} if self._session else {}
        self._out.write(json.dumps({"id": number, "method": method, "params": parameters, **session}).encode() + b"\0")
        while (message := self._read()).get("id") != number:
            self._hear(message)
        assert "error" not in message, message["error"]
        return dict(message["result"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            chunk = os.read(self._in.fileno(), 1 << 16)
            assert chunk, "the browser has ended"
            self._left += chunk
        end = self._left.index(b"\0")
        message = json.loads(self._left[:end])
        del self._left[: end + 1]  # in place: all tabs have the same
        return dict(message)

    def _hear(self, message: dict[str, Any]) -> None:
        advice = message.get("params", {}).get("entry", {}).get("source") == "recommendation"  # of Chromium, for forms
        if message.get("method") in HEARD and not advice:
            self.said.append(json.dumps(message["params"]))
