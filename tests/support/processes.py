"""Real processes, which never outlive their test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from typing import IO, TYPE_CHECKING, Final

from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PATIENCE_S: Final = 60.0  # a process can take long to start on a machine that others use too

# A killed test run must not leave its processes behind: each asks the kernel to die with it.
_DIE_WITH_PARENT: Final = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class PythonProcess:
    """A Python process in a group of its own, with all that it prints.

    Args:
        arguments: of the interpreter, such as ``-c CODE`` or ``-m MODULE``.
        env: set on top of our own environment.
        cwd: where it runs; here by default.
    """

    def __init__(
        self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | str | None = None
    ) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self.popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            cwd=cwd,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    @property
    def output(self) -> str:
        """What it, and its children, have printed so far, errors included."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for its end; return its exit code (negative: the signal that killed it).

        Raises:
            AssertionError: it did not end in time; with what it printed.
        """
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.output}") from None

    def wait_for_output(self, text: str, timeout_s: float = PATIENCE_S) -> str:
        """Wait until it has printed ``text``; return all that it printed.

        Raises:
            AssertionError: it did not, or ended before; with what it printed.
        """
        try:
            eventually(lambda: text in self.output or not self.running, timeout_s)
        except AssertionError:
            told = f"not within {timeout_s:g} s: {text!r}; it printed:\n{self.output}"
            raise AssertionError(told) from None
        output = self.output
        assert text in output, f"ended with {self.popen.returncode} before it printed {text!r}:\n{output}"
        return output

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself, not to its children."""
        self.popen.send_signal(number)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process itself by SIGKILL and wait for its end; its children live on."""
        self.popen.kill()
        self.wait()

    def end(self) -> None:
        """Kill the whole group, whatever is left of it."""
        # gone already; macOS says PermissionError of a group of zombies
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self._output.close()
