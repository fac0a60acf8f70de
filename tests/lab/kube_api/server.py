"""The listening side: connections, requests one after another, and what is noted of them."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.lab.kube_api.api import Answer, Api, Request, lines_of, refused, subject
from tests.lab.kube_api.faults import Cut, Fault, Faults
from tests.lab.kube_api.refusals import Refusal, ordered
from tests.lab.kube_api.watch import Watch
from tests.lab.kube_api.wire import GZIP_FROM, Response, compressed

Note = dict[str, Any]


@dataclass(eq=False, slots=True)
class Connection:
    """One client. ``idle`` between requests; ``watch`` is the open one."""

    socket: socket.socket
    idle: bool = True
    watch: Watch | None = None


class Server:
    """Serves each connection in a thread of its own, until the listener is shut down."""

    def __init__(self, listener: socket.socket, api: Api, tls: ssl.SSLContext | None = None) -> None:
        self.api = api
        self.faults = Faults()
        self.notes: list[Note] = []
        self.connections: set[Connection] = set()
        self._listener = listener
        self._tls = tls

    def serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # it was shut down
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with self._tls.wrap_socket(client, server_side=True) if self._tls else client as sock:
                connection = Connection(sock)
                self.connections.add(connection)
                try:
                    self._talk(connection)
                finally:
                    self.connections.discard(connection)
        except OSError:
            return  # The client has gone, or did not like our certificate.

    def _talk(self, connection: Connection) -> None:
        certificate = _common_name(connection.socket)
        with connection.socket.makefile("rb") as incoming:
            while (request := read_request(incoming, certificate)) is not None:
                connection.idle = False
                keep_alive = request.headers.get("connection", "").lower() != "close"
                if not self._respond(connection, request, keep_alive=keep_alive):
                    return
                connection.idle = True

    def _respond(self, connection: Connection, request: Request, *, keep_alive: bool) -> bool:
        """Answer one request; False ends the connection."""
        about = subject(request)
        fault = self.faults.take(about.verb, about.resource)
        note = self._note(request)
        time.sleep(fault.delay)
        answer = self._answer(request, fault)
        note["status"] = answer.status
        response = Response(connection.socket, fault, keep_alive=keep_alive)
        connection.watch = answer.watch
        try:
            _write(response, request, answer, fault)
        except Cut as cut:
            connection.watch = None  # before the client learns of the end
            response.end(cut.then)
            return False
        finally:
            connection.watch = None
        return keep_alive

    def _answer(self, request: Request, fault: Fault) -> Answer:
        if fault.status:
            answer = refused(ordered(fault.status, fault.retry_after))
            if fault.body is not None:
                return Answer(
                    fault.status,
                    [fault.body.encode()],
                    headers={**answer.headers, "Content-Type": "text/plain"},
                )
            return answer
        try:
            return self.api.answer(request)
        except Refusal as refusal:
            return refused(refusal)

    def _note(self, request: Request) -> Note:
        """Note a request, with its user in place of its token, before it is answered."""
        about = subject(request)
        try:
            user = self.api.user(request).name
        except Refusal:
            user = ""
        headers = {name: value for name, value in request.headers.items() if name != "authorization"}
        note: Note = {"verb": about.verb, "resource": about.resource, "name": about.name}
        note |= {"namespace": about.namespace, "path": request.path, "query": request.query}
        note |= {"user": user, "headers": headers, "body": request.body.decode(errors="replace")}
        note |= {"status": 0, "time": time.monotonic()}
        self.notes.append(note)
        return note


def read_request(incoming: IO[bytes], certificate: str = "") -> Request | None:
    """The next request, None when the client has ended the connection."""
    first = incoming.readline().split()
    if len(first) != 3:
        return None
    headers: dict[str, str] = {}
    while line := incoming.readline().strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    body = incoming.read(int(headers.get("content-length", "0")))
    return Request(first[0].decode(), first[1].decode(), headers, body, certificate)


def _write(response: Response, request: Request, answer: Answer, fault: Fault) -> None:
    headers: Mapping[str, str] = answer.headers
    batches = lines_of(answer)
    if answer.watch is not None:
        answer.watch.order = fault if fault.line or fault.error else None
    elif "gzip" in request.headers.get("accept-encoding", ""):
        pieces = next(batches)
        batches = iter([pieces])
        if sum(map(len, pieces)) > GZIP_FROM:
            headers = {**headers, "Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
            batches = iter([list(compressed(pieces))])
    response.begin(answer.status, headers)
    for batch in batches:
        for piece in batch:
            response.write(piece)
        if answer.watch is not None:
            response.flush()
    response.finish()


def _common_name(sock: socket.socket) -> str:
    """The name in the client's certificate, empty without one."""
    found = sock.getpeercert() if isinstance(sock, ssl.SSLSocket) else None
    subjects: Any = (found or {}).get("subject", ())
    return next((value for part in subjects for name, value in part if name == "commonName"), "")


def tls_context(folder: Path) -> ssl.SSLContext:
    """Serve with server.crt and server.key; a client may have a certificate, signed by ca.crt."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    context.load_verify_locations(folder / "ca.crt")
    context.verify_mode = ssl.CERT_OPTIONAL
    return context
