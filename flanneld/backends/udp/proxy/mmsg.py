"""Batched datagram I/O with recvmmsg(2) and sendmmsg(2), which the standard library lacks."""

from __future__ import annotations

import ctypes
import socket

_SOCKADDR = 16

_libc = ctypes.CDLL(None, use_errno=True)


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint),
        ("vector", ctypes.c_void_p),
        ("vectors", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    _fields_ = (("header", _Header), ("length", ctypes.c_uint))


class Messages:
    """Preallocated datagram slots. Slot ``i`` has ``buffers[i]``, and its address at ``names[16 * i:]``.

    The kernel accesses this memory directly: nothing is copied or allocated during use.
    """

    def __init__(self, slots: int, size: int) -> None:
        self.slots = slots
        self.buffers = [bytearray(size) for _ in range(slots)]
        self.views = [memoryview(buffer) for buffer in self.buffers]
        #: Argument for ``os.readv``.
        self.vectors = [[buffer] for buffer in self.buffers]
        self.names = bytearray(_SOCKADDR * slots)
        self._iovecs = bytearray(ctypes.sizeof(_Iovec) * slots)
        self._messages = bytearray(ctypes.sizeof(_Message) * slots)
        #: Item ``2 * i + 1`` is the number of bytes to send from slot ``i``.
        self.to_send = memoryview(self._iovecs).cast("L")
        lengths = memoryview(self._messages).cast("I")
        #: Item ``i`` is the number of bytes received in slot ``i``.
        self.received = lengths[_Message.length.offset // 4 :: ctypes.sizeof(_Message) // 4]
        self._connect(size)

    def _connect(self, size: int) -> None:
        """Point each message to its buffer and its address."""
        iovecs = (_Iovec * self.slots).from_buffer(self._iovecs)
        messages = (_Message * self.slots).from_buffer(self._messages)
        names = _address(self.names)
        for slot, buffer in enumerate(self.buffers):
            iovecs[slot].base, iovecs[slot].length = _address(buffer), size
            header = messages[slot].header
            header.name, header.name_length = names + _SOCKADDR * slot, _SOCKADDR
            header.vector, header.vectors = ctypes.addressof(iovecs[slot]), 1
        self._start = ctypes.addressof(messages)

    def receive(self, fd: int) -> int:
        """Receive pending datagrams, at most ``slots``. Return their number."""
        number: int = _libc.recvmmsg(fd, ctypes.c_void_p(self._start), self.slots, socket.MSG_DONTWAIT, None)
        return max(0, number)

    def send(self, fd: int, number: int) -> list[int]:
        """Send the first ``number`` slots. Return those the kernel refused: too long, or firewalled."""
        refused: list[int] = []
        sent = 0
        while sent < number:
            first = ctypes.c_void_p(self._start + ctypes.sizeof(_Message) * sent)
            done = _libc.sendmmsg(fd, first, number - sent, 0)
            if done <= 0:
                refused.append(sent)
            sent += max(1, done)
        return refused


def _address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
