"""Run as a script by path: prepare this process, then become the PostgreSQL program given.

A script and not ``preexec_fn``: code between fork and exec in a process with threads can
deadlock, and the caller of an embedded server has threads more often than not.

    launch.py IDENTITY PARENT PROGRAM [ARGUMENT ...]

IDENTITY  ``same``           stay who we are
          ``namespace``      uid and gid 1000 in a user namespace of our own, where that is still root outside
          ``user:UID:GID``   drop to that user, keeping root's way through folders and files
PARENT    a pid              end when that process ends (Linux; elsewhere the parent has to see to it)
          ``detached``       outlive everybody

It imports little, for it runs at each start: 20 ms in all.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

CLONE_NEWUSER = 0x10000000
PR_SET_PDEATHSIG = 1
PR_SET_SECUREBITS = 28
SECBIT_NO_SETUID_FIXUP = 1 << 2
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
CAP_DAC_OVERRIDE = 1
CAPABILITY_VERSION_3 = 0x20080522


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def become(identity: str) -> None:
    """Take the identity; the server refuses to run as root."""
    if identity == "namespace":
        outer_uid, outer_gid = os.geteuid(), os.getegid()
        _call("unshare", CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"1000 {outer_uid} 1")
        _write("/proc/self/gid_map", f"1000 {outer_gid} 1")
    elif identity.startswith("user:"):
        _, uid, gid = identity.split(":")
        os.setgroups([])
        os.setgid(int(gid))
        drop_to(int(uid))


def drop_to(uid: int) -> None:
    """Become another user who keeps, across exec, one capability: to pass by file permissions.

    The programs and the data are often under a home folder that only root may enter. Where even
    root lacks the rights to arrange this, the user goes without, and file permissions decide.
    """
    only = 1 << CAP_DAC_OVERRIDE
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    effective_permitted_inheritable = (ctypes.c_uint32 * 6)(only, only, only, 0, 0, 0)
    try:
        # without these bits setuid takes the capabilities away, and access(2) does not heed them
        _call("prctl", PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
    except (OSError, AttributeError):  # AttributeError: this system knows neither
        os.setuid(uid)
        return
    os.setuid(uid)
    _call("capset", header, effective_permitted_inheritable)
    _call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0)


def tie_to(parent: str) -> None:
    """Arrange to end with the parent; after `become`, since a change of identity undoes it."""
    if parent == "detached":
        if os.fork() != 0:
            os._exit(0)
    elif sys.platform == "linux":
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGINT)  # SIGINT: a fast, clean shutdown
        if os.getppid() != int(parent):
            os._exit(1)  # it died before we had asked to be told


def main() -> NoReturn:
    """Do as the module says."""
    identity, parent, program, *arguments = sys.argv[1:]
    try:
        become(identity)
        tie_to(parent)
        os.execv(program, [program, *arguments])  # noqa: S606 - an argument list needs no shell
    except OSError as error:
        sys.stderr.write(f"cannot run {program} as '{identity}': {error}\n")
        raise SystemExit(126) from None


if __name__ == "__main__":
    main()
