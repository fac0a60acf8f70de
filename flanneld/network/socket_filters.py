"""Filters in classic BPF, by which the kernel keeps from a socket what is not for it.

Such messages would fill the socket's buffer while its reader sleeps, and the kernel drops what comes then.
"""

from __future__ import annotations

import socket
import struct
from array import array
from contextlib import suppress

#: Missing from Python's socket module (asm-generic/socket.h).
_SO_ATTACH_FILTER = 26
#: linux/filter.h: struct sock_filter and sock_fprog.
_INSTRUCTION = struct.Struct("=HBBI")
_PROGRAM = struct.Struct("@HP")

# linux/bpf_common.h. Words are loaded in network byte order. "After" counts from the end of an IPv4 header.
_LOAD_WORD, _LOAD_BYTE_AFTER, _LOAD_HALF_AFTER, _MEASURE_IPV4_HEADER = 0x20, 0x50, 0x48, 0xB1
_JUMP_IF_EQUAL, _RETURN = 0x15, 0x06
_PASS, _DROP = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)
#: Offsets: of nlmsg_pid (linux/netlink.h), of the type and the identifier of an echo (RFC 792, RFC 4443).
_PORT, _TYPE, _IDENTIFIER = 12, 0, 4


def drop_changes_by(sock: socket.socket, port: int) -> None:
    """Let the kernel drop notifications that name this netlink port as their author.

    Some notifications name no author.
    """
    _attach(sock, (_LOAD_WORD, 0, 0, _PORT), (_JUMP_IF_EQUAL, 0, 1, socket.htonl(port)), _DROP, _PASS)


def pass_echo_replies(sock: socket.socket, kind: int, identifier: int) -> None:
    """Let the kernel drop what is not of this ICMP type and identifier, before a raw socket holds it.

    What came before the filter is dropped, too: it may have filled the socket's buffer.
    """
    header = [(_MEASURE_IPV4_HEADER, 0, 0, 0)] if sock.family == socket.AF_INET else []
    is_of_kind = (_LOAD_BYTE_AFTER, 0, 0, _TYPE), (_JUMP_IF_EQUAL, 0, 3, kind)
    is_of_identifier = (_LOAD_HALF_AFTER, 0, 0, _IDENTIFIER), (_JUMP_IF_EQUAL, 0, 1, identifier)
    _attach(sock, *header, *is_of_kind, *is_of_identifier, _PASS, _DROP)
    with suppress(BlockingIOError):
        while True:
            sock.recv(1, socket.MSG_DONTWAIT)


def _attach(sock: socket.socket, *program: tuple[int, int, int, int]) -> None:
    """Attach instructions: code, how many to skip if it holds and if not, operand. Optional for readers."""
    code = array("B", b"".join(_INSTRUCTION.pack(*each) for each in program))
    with suppress(OSError):
        pointer = _PROGRAM.pack(len(program), code.buffer_info()[0])
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)
