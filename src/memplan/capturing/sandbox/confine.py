"""Confinement by the kernel: Landlock for writes to files, seccomp for the rest.

Both bind the calling thread and what it starts, cannot be undone, and need no privileges. Landlock
(Linux 5.13; `Documentation/userspace-api/landlock.rst`) denies writing, creating and removing files
outside the directories named. What it does not govern, seccomp does: sockets that leave the
machine are refused, and changes of a file's mode, owner, times and attributes are not carried out
though they report success, so that compilers and archivers run on.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import posix
import posixpath
import socket
import struct
from collections.abc import Iterable
from typing import NamedTuple

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_PATH_BENEATH = 1
_WRITE_FILE = 1 << 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_REMOVE_DIR = 1 << 4
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_NEEDED_VERSION = 2
"""The first that lets files move between the directories of the scratch directory."""
_TRUNCATE_VERSION = 3

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER_MODE = 38, 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X32 = 0x40000000


class _Machine(NamedTuple):
    """System call numbers of an architecture."""

    arch: int
    socket: int
    truncate: int
    pretended: tuple[int, ...]
    """chmod, chown, utime, setxattr, removexattr and their variants."""


_IO_URING_SETUP = 425
_MACHINES = {
    "x86_64": _Machine(
        0xC000003E,
        41,
        76,
        (*range(90, 95), 132, *range(188, 191), *range(197, 200), 235, 260, 261, 268, 280, 452),
    ),
    "aarch64": _Machine(0xC00000B7, 198, 45, (5, 6, 7, 14, 15, 16, 52, 53, 54, 55, 88, 452)),
}


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def landlock_version() -> int:
    """The kernel's Landlock ABI version; 0 where there is none."""
    result = _libc().syscall(
        _CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION_FLAG)
    )
    return max(int(result), 0)


def can_confine_files() -> bool:
    """Whether `confine_files` can be used on this kernel."""
    return landlock_version() >= _NEEDED_VERSION


def can_confine_commands() -> bool:
    """Whether `confine_files` and `confine_calls` can both be used."""
    return can_confine_files() and platform.machine() in _MACHINES


def confine_files(writable: Iterable[str], removable: Iterable[str] = ()) -> None:
    """Let the calling thread, and what it starts, write below the directories `writable` only.

    Below `removable`, empty directories may be removed, no more. Descriptors that are already open
    keep working. Raises OSError where the kernel refuses.
    """
    libc, version = _libc(), landlock_version()
    handled = _WRITE_FILE | _REMOVE_AND_MAKE | _REFER
    if version >= _TRUNCATE_VERSION:
        handled |= _TRUNCATE
    attributes = struct.pack("=Q", handled)
    ruleset = _check(
        libc.syscall(
            _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
        )
    )
    try:
        for directory in writable:
            _allow(libc, ruleset, directory, handled)
        for directory in removable:
            _allow(libc, ruleset, directory, _REMOVE_DIR)
        _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _check(libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint(0)))
    finally:
        posix.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, directory: str, rights: int) -> None:
    fd = posix.open(directory, posix.O_PATH | posix.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, fd)
        _check(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, ctypes.c_uint(0)))
    finally:
        posix.close(fd)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _filter_program(machine: _Machine, allow_network: bool, truncate: bool) -> bytes:
    """BPF: every rule is a jump over the next instruction, which returns the rule's answer."""

    def answer(number: int, error: int) -> list[bytes]:
        return [
            _instruction(_JUMP_EQUAL, number, 0, 1),
            _instruction(_RETURN, _ERRNO | error),
        ]

    program = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_JUMP_EQUAL, machine.arch, 1, 0),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_JUMP_AT_LEAST, _X32, 0, 1),
        _instruction(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for number in machine.pretended:
        program += answer(number, 0)
    if not truncate:
        program += answer(machine.truncate, errno.EACCES)
    if not allow_network:
        program += answer(_IO_URING_SETUP, errno.ENOSYS)
        program += [
            _instruction(_JUMP_EQUAL, machine.socket, 1, 0),
            _instruction(_RETURN, _ALLOW),
            _instruction(_LOAD, _FIRST_ARGUMENT_AT),
            _instruction(_JUMP_EQUAL, socket.AF_UNIX, 1, 0),
            _instruction(_JUMP_EQUAL, socket.AF_NETLINK, 0, 1),
            _instruction(_RETURN, _ALLOW),
            _instruction(_RETURN, _ERRNO | errno.ENETUNREACH),
        ]
    else:
        program.append(_instruction(_RETURN, _ALLOW))
    return b"".join(program)


def confine_calls(allow_network: bool) -> None:
    """Install the seccomp filter of this module in the calling thread, after `confine_files`."""
    machine = _MACHINES[platform.machine()]
    truncate = landlock_version() >= _TRUNCATE_VERSION
    code = _filter_program(machine, allow_network, truncate)
    program = _Program(len(code) // 8, code)
    _check(_libc().prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0))


def lockdown(scratch: str, writable: Iterable[str] = ()) -> bool:
    """Let this whole process write only below `scratch`, `/dev` and `writable`, for good.

    For a process that captures and then ends: native libraries that open files themselves are held
    too. To be called from the main thread before others start (they inherit it; those already
    running do not). The scratch directory itself can still be removed. Returns False, with nothing
    done, where the kernel cannot.
    """
    if not can_confine_files():
        return False
    try:
        confine_files((scratch, "/dev", *writable), removable=(posixpath.dirname(scratch),))
    except OSError:
        return False
    return True
