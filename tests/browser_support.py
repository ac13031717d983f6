"""A headless Chromium for tests, driven through the DevTools protocol over a pipe: no port, no further package.

Messages are JSON, each ended by a NUL; Chromium reads them from descriptor 3 and writes them to 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT_S = 60.0


def find_browser() -> str | None:
    """The program, ``FLIGHTREC_BROWSER`` first; None if there is none."""
    return os.environ.get("FLIGHTREC_BROWSER") or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one page. A context manager.

    Attributes:
        events: what the page told: console messages, exceptions, log entries, requests.
    """

    def __init__(self, program: str, profile: Path) -> None:
        to_child, self._to = os.pipe()
        self._from, from_child = os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-extensions",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        script = f'exec "$0" "$@" 3<&{to_child} 4>&{from_child}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *options],
            pass_fds=(to_child, from_child),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._session = None
            self.send("Browser.close")
        except OSError:
            self._process.kill()
        finally:
            os.close(self._to)
            os.close(self._from)
            self._process.wait(TIMEOUT_S)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a file and wait until all plots that can be seen are drawn."""
        self.events.clear()
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete' && document.documentElement.dataset.drawn === 'all'")

    def resize(self, width: int, height: int) -> None:
        """Change the size of the page."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; an error of the script fails the test."""
        done = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true."""
        limit = time.monotonic() + TIMEOUT_S
        while not self.evaluate(condition):
            assert time.monotonic() < limit, f"still waiting for {condition}; the page told {self.told()}"
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        """Press keys: ``Tab``, ``Enter``."""
        codes = {"Tab": 9, "Enter": 13}
        for key in keys:
            common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
            text = {"text": "\r"} if key == "Enter" else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", **common, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def write(self, text: str) -> None:
        """Type a text where the focus is."""
        self.send("Input.insertText", text=text)

    def told(self) -> list[str]:
        """Errors and warnings of the page: console, exceptions, refused by the policy."""
        found = []
        for event in self.events:
            parameters = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters["exceptionDetails"]))
            elif event.get("method") == "Runtime.consoleAPICalled":
                found.append(f"console.{parameters['type']}: {parameters['args']}")
            elif event.get("method") == "Log.entryAdded":
                found.append(f"{parameters['entry']['level']}: {parameters['entry']['text']}")
            elif event.get("method") == "Page.javascriptDialogOpening":
                found.append(f"a dialog: {parameters['message']}")
        return found

    def requests(self) -> list[str]:
        """Addresses that the page asked for, beyond its own file and data in itself."""
        urls = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("file:", "data:", "blob:"))]

    def picture(self, path: Path) -> None:
        """Save what is seen as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def _receive(self) -> dict[str, Any]:
        limit = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, limit - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            if not part:
                raise BrokenPipeError("the browser ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


def visible_text(browser: Browser, selectors: Sequence[str]) -> list[str]:
    """Text of all elements that match."""
    chosen = json.dumps(", ".join(selectors))
    return list(browser.evaluate(f"Array.from(document.querySelectorAll({chosen})).map(e => e.textContent)"))
