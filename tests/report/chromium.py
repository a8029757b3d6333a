"""A headless Chromium driven over its debugging pipe: enough of the DevTools protocol to test a page, nothing more."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """Chromium's command, or ``None``."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class Chromium:
    """One browser process; ``open`` gives pages."""

    def __init__(self, command: str, profile: Path) -> None:
        browser_reads, self._write = os.pipe()
        self._read, browser_writes = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4; a small program puts the pipes there.
        place = "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"
        safe_reads, safe_writes = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (browser_reads, browser_writes))
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                place,
                str(safe_reads),
                str(safe_writes),
                command,
                *FLAGS,
                f"--user-data-dir={profile}",
            ],
            pass_fds=(safe_reads, safe_writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(safe_reads)
        os.close(safe_writes)
        os.close(browser_reads)
        os.close(browser_writes)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(timeout=20)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._selector.close()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, session: str | None = None, *, wait_s: float = 60, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come in between are kept."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        end = time.monotonic() + wait_s
        while True:
            answer = self._receive(end)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def wait_for(self, event: str, session: str, *, wait_s: float = 60) -> dict[str, Any]:
        """The first such event of a session since ``events`` was cleared."""
        end = time.monotonic() + wait_s
        while True:
            for kept in self.events:
                if kept.get("method") == event and kept.get("sessionId") == session:
                    return kept
            self.events.append(self._receive(end))

    def open(self, path: Path, **look: Any) -> Page:
        """A page showing a file, loaded; see ``Page.look`` for the keywords."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.look(**look)
        self.events.clear()
        began = time.monotonic()
        page.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired", session)
        page.load_s = time.monotonic() - began
        return page

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not self._selector.select(timeout=max(0.0, end - time.monotonic())):
                raise TimeoutError("Chromium did not answer in time")
            piece = os.read(self._read, 1 << 20)
            if not piece:
                raise OSError("Chromium closed its debugging pipe")
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        return message


class Page:
    """One tab."""

    def __init__(self, browser: Chromium, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target
        self.load_s = 0.0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def look(self, *, width: int = 1280, height: int = 900, scheme: str = "light", media: str = "") -> None:
        """Size in CSS pixels, colour scheme, and media type (``print`` or empty)."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, *, code: int, text: str = "") -> None:
        """One key, down and up."""
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra)

    def type(self, text: str) -> None:
        """Text into the focused field."""
        self.call("Input.insertText", text=text)

    def events(self, *methods: str) -> list[dict[str, Any]]:
        """What happened so far, of these kinds."""
        self.run("0")  # flush what is on its way
        return [
            e["params"]
            for e in self._browser.events
            if e.get("method") in methods and e.get("sessionId") == self._session
        ]

    def picture(self, path: Path, *, full: bool = True) -> None:
        """Save a screenshot."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        """The page as it prints on A4."""
        sheet = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)
        return base64.b64decode(sheet["data"])

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
