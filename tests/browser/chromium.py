"""A headless Chromium, driven over a pipe by the DevTools protocol.

Nothing but the browser is needed: messages are JSON, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["Browser", "find_chromium"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one headless browser.

    Attributes:
        problems: Console errors, exceptions, and requests that left the file.
    """

    def __init__(self, executable: str, profile: Path) -> None:
        to_browser, from_us = os.pipe()
        from_browser, to_us = os.pipe()
        self._write, self._read = from_us, from_browser
        # The browser reads descriptor 3 and writes descriptor 4.
        command = (
            f"exec {executable} --headless=new --no-sandbox --disable-gpu "
            f"--disable-dev-shm-usage --hide-scrollbars --no-first-run "
            f"--user-data-dir={profile} --remote-debugging-pipe about:blank "
            f"3<&{to_browser} 4>&{to_us}"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(to_browser, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(to_us)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.problems: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(timeout=_TIMEOUT_S)
        os.close(self._write)
        os.close(self._read)

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Load a file at a width, and wait until it has run."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._loaded:
            self._take(self._receive(deadline))

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page."""
        answer = self.call(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Save a picture of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **params: Any) -> Any:
        """Send one command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {
            "id": self._number,
            "method": method,
            "params": params,
        }
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            found = self._receive(deadline)
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]
            self._take(found)

    def _take(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:")):
                self.problems.append(f"asked for {url}")

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select(
                [self._read], [], [], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise TimeoutError("the browser did not answer")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser ended")
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found
