"""A headless Chromium, told what to do through its debugging pipe (DevTools protocol)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")


class Browser:
    """One page. Commands go to descriptor 3 of the browser, answers and events come from its 4."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = commands
        self._answers = os.fdopen(answers, "rb")
        self._waiting = b""
        self._number = 0
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable")

    def open(self, path: Path) -> None:
        self._call("Page.navigate", url=path.as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            continue

    def value(self, expression: str) -> Any:
        """Return the JSON value of an expression in the page."""
        return self._call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get(
            "value"
        )

    def press(self, key: str) -> None:
        """Press a key, as a person does."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}))

    def prefer(self, scheme: str) -> None:
        """Set the preferred colours: ``light`` or ``dark``."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            continue
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            piece = self._answers.read1(1 << 16)
            assert piece, "the browser has ended"
            self._waiting += piece
        data, _, self._waiting = self._waiting.partition(b"\0")
        message: dict[str, Any] = json.loads(data)
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Run a browser with a new profile, and end it with its children."""
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    # The shell moves both to the numbers that the browser expects.
    script = f'exec 3<&{their_in} 4>&{their_out}; exec "$@"'
    command = ["bash", "-c", script, "bash", "chromium", *_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        command, pass_fds=(their_in, their_out), stderr=subprocess.DEVNULL, start_new_session=True
    )
    os.close(their_in)
    os.close(their_out)
    try:
        yield Browser(our_out, our_in)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
        os.close(our_out)
