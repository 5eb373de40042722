"""A page opened in headless Chromium, through the DevTools protocol on a pair of pipes: nothing but Python needed."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = "--headless --no-sandbox --disable-gpu --no-first-run --hide-scrollbars --disable-dev-shm-usage"


class Page:
    """`errors` collects what the page threw or logged as an error, `requests` every address it asked for."""

    def __init__(self, path: Path, profile: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        theirs, ours = os.pipe(), os.pipe()  # commands to fd 3 of the browser, answers from its fd 4
        for descriptor in (theirs[0], ours[1]):
            os.set_inheritable(descriptor, True)
        shell = f"exec {BROWSER} {OPTIONS} --user-data-dir={profile} --window-size={width},{height} "
        shell += f"--remote-debugging-pipe about:blank 3<&{theirs[0]} 4>&{ours[1]}"
        self._process = subprocess.Popen(
            ["bash", "-c", shell], close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs[0])
        os.close(ours[1])
        self._to, self._from = os.fdopen(theirs[1], "wb", buffering=0), os.fdopen(ours[0], "rb", buffering=0)
        self._buffer, self._number, self._session = b"", 0, None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.size(width, height)
        self.call("Page.navigate", url=path.resolve().as_uri())

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._to.close()
        self._from.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._to.write(json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < deadline, f"{expression} did not come true; errors: {self.errors}"
            time.sleep(0.1)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **(
            {"clip": {"x": 0, "y": 0, "width": self.value("innerWidth"), "scale": 1,
                      "height": self.value("document.documentElement.scrollHeight")}} if whole else {}
        ))  # fmt: skip
        path.write_bytes(base64.b64decode(shot["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            received = self._from.read(2**20)
            assert received, "the browser has gone"
            self._buffer += received
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def _note(self, event: dict[str, Any]) -> None:
        method, given = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(given["exceptionDetails"].get("exception", {}).get("description", "thrown"))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(part.get("value", part.get("description"))) for part in given["args"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(given["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
