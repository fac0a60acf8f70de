"""Codec of VICI, the control protocol of strongSwan's charon (pure).

Facts: strongSwan's src/libcharon/plugins/vici/README.md. A packet on the stream socket is a length of four
bytes, a type, for some types a name, and a message: a tree of sections, lists and values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum

from msgspec import Struct

from flanneld.errors import Retryable

#: Bytes of a message, at most, as in charon (VICI_MESSAGE_SIZE_MAX).
LONGEST_PACKET = 512 * 1024
#: Levels of nested sections, at most; charon's own messages have five.
_DEEPEST = 16

#: Message to send, or a section in it.
Section = Mapping[str, "ViciValue"]
ViciValue = bytes | str | Sequence[bytes | str] | Section
#: Message or section as received.
ReadValue = bytes | list[bytes] | dict[str, "ReadValue"]
ReadSection = dict[str, ReadValue]

_LENGTH = struct.Struct(">I")
_SHORT, _LONG = struct.Struct(">B"), struct.Struct(">H")


class MalformedVici(Retryable):
    """Error for bytes that charon never sends."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"charon's answer is not understood: {problem}", "see what listens on its socket")


class PacketType(IntEnum):
    """Type of a packet."""

    REQUEST = 0
    RESPONSE = 1
    UNKNOWN_COMMAND = 2
    REGISTER = 3
    UNREGISTER = 4
    CONFIRM = 5
    UNKNOWN_EVENT = 6
    EVENT = 7


class _Element(IntEnum):
    SECTION_START = 1
    SECTION_END = 2
    KEY_VALUE = 3
    LIST_START = 4
    LIST_ITEM = 5
    LIST_END = 6


_NAMED = frozenset({PacketType.REQUEST, PacketType.REGISTER, PacketType.UNREGISTER, PacketType.EVENT})


class ViciPacket(Struct, frozen=True, gc=False):
    """Packet without its length; ``name`` is that of the command or event, if the type has one."""

    kind: PacketType
    name: str
    message: ReadSection


def pack(kind: PacketType, name: str = "", message: Section | None = None) -> bytes:
    """Return a packet with its length. Raises ``ValueError`` if it is too long."""
    named = _short(name) if kind in _NAMED else b""
    body = bytes([kind]) + named + _pack_section(message or {})
    if len(body) > LONGEST_PACKET:
        raise ValueError(f"a message of {len(body)} bytes is longer than charon takes")
    return _LENGTH.pack(len(body)) + body


def length_of(header: bytes) -> int:
    """Return the length of the packet that follows. Raises ``MalformedVici`` if it is too long."""
    (length,) = _LENGTH.unpack(header)
    if not 1 <= length <= LONGEST_PACKET:
        raise MalformedVici(f"a packet of {length} bytes")
    return int(length)


def unpack(body: bytes) -> ViciPacket:
    """Read a packet without its length. Raises ``MalformedVici``."""
    reader = _Reader(body)
    (number,) = reader.take(1)
    try:
        kind = PacketType(number)
    except ValueError:
        raise MalformedVici(f"packet type {number}") from None
    name = reader.text() if kind in _NAMED else ""
    return ViciPacket(kind, name, reader.section())


def text(section: Mapping[str, ReadValue], name: str) -> str:
    """Return a value as text; empty if it is missing."""
    value = section.get(name)
    return value.decode(errors="replace") if isinstance(value, bytes) else ""


def texts(section: Mapping[str, ReadValue], name: str) -> list[str]:
    """Return a list as text; empty if it is missing."""
    value = section.get(name)
    return [each.decode(errors="replace") for each in value] if isinstance(value, list) else []


def number(section: Mapping[str, ReadValue], name: str) -> int:
    """Return a value as a number; 0 if it is missing."""
    found = text(section, name)
    return int(found) if found.isascii() and found.isdecimal() and len(found) < 20 else 0


def sections(section: Mapping[str, ReadValue]) -> dict[str, ReadSection]:
    """Return the sections inside a section."""
    return {name: value for name, value in section.items() if isinstance(value, dict)}


# ---- packing ---------------------------------------------------------------------------------------


def _pack_section(section: Section) -> bytes:
    return b"".join(_pack_value(name, value) for name, value in section.items())


def _pack_value(name: str, value: ViciValue) -> bytes:
    if isinstance(value, bytes | str):
        return bytes([_Element.KEY_VALUE]) + _short(name) + _long(value)
    if isinstance(value, Mapping):
        start, end = bytes([_Element.SECTION_START]), bytes([_Element.SECTION_END])
        return start + _short(name) + _pack_section(value) + end
    items = b"".join(bytes([_Element.LIST_ITEM]) + _long(item) for item in value)
    return bytes([_Element.LIST_START]) + _short(name) + items + bytes([_Element.LIST_END])


def _short(name: str) -> bytes:
    data = name.encode()
    if len(data) > 255:
        raise ValueError("a name is longer than 255 bytes")
    return _SHORT.pack(len(data)) + data


def _long(value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    if len(data) > 65535:
        raise ValueError("a value is longer than 65535 bytes")
    return _LONG.pack(len(data)) + data


# ---- reading ---------------------------------------------------------------------------------------


class _Reader:
    """Reader of elements in order. Raises ``MalformedVici`` at the first invalid one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    def take(self, length: int) -> bytes:
        end = self._offset + length
        if end > len(self._data):
            raise MalformedVici("it was cut off")
        piece = self._data[self._offset : end]
        self._offset = end
        return piece

    def text(self) -> str:
        return self.take(_SHORT.unpack(self.take(1))[0]).decode(errors="replace")

    def value(self) -> bytes:
        return self.take(_LONG.unpack(self.take(2))[0])

    def section(self) -> ReadSection:
        """Read to the end of the message."""
        stack: list[ReadSection] = [{}]
        while self._offset < len(self._data):
            match self.take(1)[0]:
                case _Element.SECTION_START if len(stack) < _DEEPEST:
                    inner: ReadSection = {}
                    name = self.text()
                    stack[-1][name] = inner
                    stack.append(inner)
                case _Element.SECTION_END if len(stack) > 1:
                    stack.pop()
                case _Element.KEY_VALUE:
                    name = self.text()  # separate, because Python would evaluate the value first
                    stack[-1][name] = self.value()
                case _Element.LIST_START:
                    name = self.text()
                    stack[-1][name] = self._list()
                case element:
                    raise MalformedVici(f"element {element} in its place")
        if len(stack) > 1:
            raise MalformedVici("a section has no end")
        return stack[0]

    def _list(self) -> list[bytes]:
        items = []
        while (element := self.take(1)[0]) == _Element.LIST_ITEM:
            items.append(self.value())
        if element != _Element.LIST_END:
            raise MalformedVici(f"element {element} in a list")
        return items
