"""Starting PostgreSQL's programs: as whom, and tied to whose life.

PostgreSQL refuses to run as root, which is who one is in most containers and many CI machines.
Two ways out need no set-up: a user namespace of one's own, in which root is mapped to an
ordinary number (files stay root's, nothing is created, nothing changes hands), and dropping to
``nobody``, to whom the data folder is then given. Both are tried by running ``postgres
--version`` through them.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, TypeAlias

from jobq._embedded import launch
from jobq._embedded.errors import EmbeddedError, ServerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobq._embedded.binaries import Binaries

_LAUNCH: Final = str(Path(launch.__file__))
_INITDB_TIMEOUT_S: Final = 120.0
_PROBE_TIMEOUT_S: Final = 20.0

Process: TypeAlias = "subprocess.Popen[bytes]"
_Start: TypeAlias = "tuple[Callable[[], Process], Future[Process]]"


@dataclass(frozen=True, slots=True)
class Identity:
    """As whom the programs run.

    Attributes:
        mode: the launcher's first argument.
        owner: uid and gid that the data folder must be given to; ``None`` keeps ours.
    """

    mode: str
    owner: tuple[int, int] | None = None


def choose_identity(binaries: Binaries) -> Identity:
    """Return as whom this process can run the server.

    Raises:
        EmbeddedError: we are root, and neither way out works here.
    """
    if os.geteuid() != 0:
        return Identity("same")
    refusals: list[str] = []
    for identity in _ways_out_of_root():
        probe = _run_as(identity, [binaries.program("postgres"), "--version"], timeout_s=_PROBE_TIMEOUT_S)
        if probe.returncode == 0:
            return identity
        refusals.append(f"\n  - {probe.stderr.strip() or probe.stdout.strip()}")
    raise EmbeddedError(
        "PostgreSQL does not run as root, and neither a user namespace nor another user worked here."
        " Start this as an ordinary user." + "".join(refusals)
    )


def _ways_out_of_root() -> Sequence[Identity]:
    import pwd  # noqa: PLC0415 - there is none on Windows, where this module must still say so politely

    ways = [Identity("namespace")] if sys.platform == "linux" else []
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        return ways
    owner = (nobody.pw_uid, nobody.pw_gid)
    return [*ways, Identity(f"user:{owner[0]}:{owner[1]}", owner)]


def run_program(identity: Identity, command: Sequence[str]) -> None:
    """Run a program to its end.

    Raises:
        ServerFailed: it failed; with all that it said.
    """
    done = _run_as(identity, command, timeout_s=_INITDB_TIMEOUT_S)
    if done.returncode != 0:
        raise ServerFailed(f"{command[0]} failed ({done.returncode}):\n{done.stdout}{done.stderr}")


def spawn_server(identity: Identity, command: Sequence[str], log: IO[bytes]) -> Process:
    """Start a server that ends with this process, whatever becomes of it."""
    return _from_lasting_thread(lambda: _popen(identity, str(os.getpid()), command, log))


def spawn_detached(identity: Identity, command: Sequence[str], log: IO[bytes]) -> None:
    """Start a server that outlives this process."""
    _popen(identity, "detached", command, log).wait()


def _popen(identity: Identity, parent: str, command: Sequence[str], log: IO[bytes]) -> Process:
    return subprocess.Popen(
        _launch(identity, parent, command),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=_environment(),
        start_new_session=True,  # Ctrl-C in the terminal is for us, and we stop the server in order
    )


def _run_as(
    identity: Identity, command: Sequence[str], *, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            _launch(identity, str(os.getpid()), command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env=_environment(),
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise ServerFailed(f"{command[0]} did not end within {timeout_s:g} s") from error


def _launch(identity: Identity, parent: str, command: Sequence[str]) -> list[str]:
    # -I -S: nothing of the caller's environment, and no site packages, to load
    return [sys.executable, "-I", "-S", _LAUNCH, identity.mode, parent, *command]


def _environment() -> dict[str, str]:
    """Return our environment without what would steer PostgreSQL (PGDATA, PGPORT, a language …)."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_"))}
    return kept | {"LC_ALL": "C", "TZ": "UTC"}


# The kernel counts the *thread* that started a child as its parent: when that thread ends, the
# server would be stopped though the process lives on (a fixture in a worker thread did that). So
# starts from any but the main thread are handed to a thread that lasts as long as the process.
_work: queue.SimpleQueue[_Start] | None = None
_work_pid = 0
_work_lock = threading.Lock()


def _from_lasting_thread(start: Callable[[], Process]) -> Process:
    if threading.current_thread() is threading.main_thread():
        return start()
    answer: Future[Process] = Future()
    _lasting_thread().put((start, answer))
    return answer.result()


def _lasting_thread() -> queue.SimpleQueue[_Start]:
    global _work, _work_pid  # one thread for the whole process, by its nature
    with _work_lock:
        if _work is None or _work_pid != os.getpid():  # a fork leaves the thread behind
            work: queue.SimpleQueue[_Start] = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(work,), name="jobq-embedded", daemon=True).start()
            _work, _work_pid = work, os.getpid()
        return _work


def _serve(work: queue.SimpleQueue[_Start]) -> None:
    while True:
        start, answer = work.get()
        try:
            answer.set_result(start())
        except BaseException as error:  # noqa: BLE001 - handed to the caller whole
            answer.set_exception(error)
