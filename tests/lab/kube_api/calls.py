"""Calls of ``Control`` from another process: a line of JSON each over a unix socket, and one back."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, cast

from tests.lab.kube_api.control import Control
from tests.lab.kube_api.faults import Fault

#: Those whose arguments are faults.
_TAKE_FAULTS = ("add_fault", "disturb_watches")


class _Remote:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        def call(*values: Any, **named: Any) -> Any:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(60)
                client.connect(str(self._path))
                text = json.dumps([name, values, named], default=_as_dict)
                client.sendall(text.encode() + b"\n")
                answer = json.loads(client.makefile("rb").readline())
            if "error" in answer:
                raise RuntimeError(f"{name}: {answer['error']}")
            return answer["result"]

        return call


def remote(path: Path) -> Control:
    """The control of a server in another process, which listens at this socket."""
    return cast("Control", _Remote(path))


def serve(control: Control, path: Path) -> None:
    """Take calls until the process ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        waiting = path.with_suffix(".new")
        listener.bind(str(waiting))
        listener.listen(64)
        waiting.rename(path)  # whoever sees it can connect
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(control, client), daemon=True).start()


def _serve(control: Control, client: socket.socket) -> None:
    with client, client.makefile("rwb") as stream:
        name, values, named = json.loads(stream.readline())
        values = [Fault(**value) if name in _TAKE_FAULTS else value for value in values]
        try:
            answer = {"result": getattr(control, name)(*values, **named)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        stream.write(json.dumps(answer).encode() + b"\n")


def _as_dict(value: Any) -> Any:
    assert is_dataclass(value), f"{value!r} cannot be sent"
    assert not isinstance(value, type)
    return asdict(value)
