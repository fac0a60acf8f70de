"""What tests ask of a cloud in another process: a line of JSON each over a unix socket, and one back."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from flanneld.backends.cloud.contract import Trouble


def serve_control(cloud: Any, hops: dict[str, str], path: Path) -> None:
    """Take calls of the cloud's methods until the process ends; ``add_node`` makes its hop known."""
    with socket.socket(socket.AF_UNIX) as listener:
        waiting = path.with_suffix(".new")
        listener.bind(str(waiting))
        listener.listen(64)
        waiting.rename(path)  # whoever sees it can connect
        while True:
            client, _ = listener.accept()
            with client, client.makefile("rwb") as stream:
                name, values = json.loads(stream.readline())
                try:
                    answer = {"result": _call(cloud, hops, name, values)}
                except Exception as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                stream.write(json.dumps(answer).encode() + b"\n")


def _call(cloud: Any, hops: dict[str, str], name: str, values: list[Any]) -> Any:
    if name == "set":
        setattr(cloud, *values)
        return None
    if name == "fail":
        purpose, trouble, times = values
        return cloud.fail(purpose, Trouble(trouble), times)
    if name == "key":
        return cloud.key
    result = getattr(cloud, name)(*values)
    if name == "add_node":
        hops[result] = values[0]
    return result


def call(path: Path, name: str, *values: Any) -> Any:
    """Call a method of the cloud whose control listens at this socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect(str(path))
        client.sendall(json.dumps([name, values]).encode() + b"\n")
        answer = json.loads(client.makefile("rb").readline())
    if "error" in answer:
        raise RuntimeError(f"{name}: {answer['error']}")
    return answer["result"]
