"""A real browser for tests: headless Chromium, spoken to over its debugging pipe. No driver, no extra package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WHY_NOT = "there is no Chromium on this machine (Debian: apt-get install chromium)"
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--mute-audio",
)


class Browser:
    """One window. `problems` collects console errors, failed requests and uncaught exceptions."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self._profile = tempfile.mkdtemp(prefix="st-chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        move = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        arguments = [PROGRAM, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", move, "bash", *arguments],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._ids = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._arrived = threading.Condition()
        self._session = ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._write)  # the browser ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, url: str) -> None:
        """Go there."""
        self._call("Page.navigate", url=url)

    def look(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """The size of the window, the scheme of colours, and whether it is a phone."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, script: str) -> Any:
        """What an expression is in the page; promises are awaited."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, *, timeout_s: float) -> float:
        """Until an expression is true; how long that took."""
        began = time.monotonic()
        while not self.evaluate(script):
            if time.monotonic() - began >= timeout_s:
                raise TimeoutError(f"never true in the page: {script}")
            time.sleep(0.05)
        return time.monotonic() - began

    def press(self, key: str) -> None:
        """A key of the keyboard."""
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode={"Tab": 9}.get(key, 0)
            )

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """As PNG."""
        data = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(data["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        with self._arrived:
            if not self._arrived.wait_for(lambda: number in self._answers, 60):
                raise TimeoutError(f"the browser does not answer {method}")
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _listen(self) -> None:
        rest = b""
        while chunk := os.read(self._read, 1 << 16):
            *messages, rest = (rest + chunk).split(b"\0")
            for text in messages:
                self._take(json.loads(text))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            with self._arrived:
                self._answers[message["id"]] = message
                self._arrived.notify_all()
            return
        details, method = message.get("params", {}), message["method"]
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(details["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{details['entry']['text']} {details['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.problems.append(str(details["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
