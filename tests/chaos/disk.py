"""A server whose write-ahead log stands on a small disk, which is filled and made empty again."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Final

import psycopg

from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jobq.embedded import EmbeddedPostgres
    from tests.chaos.stage import Stage

_SIZE: Final = "160m"  # ten segments of the log
_RECOVERY_S: Final = 20.0
_STEP_BYTES: Final = 1 << 20
SETTINGS: Final = {"min_wal_size": "32MB", "max_wal_size": "64MB", "restart_after_crash": "on"}


class CannotMountError(Exception):
    """This process may not mount anything."""


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mount a small disk in memory.

    Raises:
        CannotMountError: only root may, and not in every container.
    """
    folder.mkdir()
    ran = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "none", str(folder)], capture_output=True, check=False
    )
    if ran.returncode != 0:
        raise CannotMountError(ran.stderr.decode(errors="replace"))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def move_log(server: EmbeddedPostgres, disk: Path) -> None:
    """Stop a server, and start it again with its log on that disk."""
    server.stop()
    log = server.data_dir / "data" / "pg_wal"
    owner = log.stat()
    shutil.move(log, disk / "pg_wal")
    log.symlink_to(disk / "pg_wal")
    for path in (disk, *disk.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)
    server.start()


class FullDisk:
    """Fills the disk under load until the server cannot write, and makes room again.

    Args:
        server: whose log is on it.
        disk: where it is mounted.
    """

    def __init__(self, server: EmbeddedPostgres, disk: Path) -> None:
        self._server = server
        self._ballast = disk / "ballast"

    def fault(self, stage: Stage) -> None:
        """Do it again and again."""
        first = True
        while first or not stage.is_over():
            first = False
            stage.pause(0.5, 1.5)
            self._fill(stage)
            stage.count("times the disk was full")
            time.sleep(stage.rng.uniform(0.5, 2.0))
            self._ballast.unlink()
            began = time.monotonic()
            self._bring_back(stage)
            stage.await_work(60.0)
            stage.note_longest("s until work went on with room again", time.monotonic() - began)

    def _fill(self, stage: Stage) -> None:
        """Leave no byte free, and make the server want more of the log, until it fails."""

        def fails() -> bool:
            self._take_the_rest()
            try:
                stage.sql("select pg_switch_wal()")
                stage.sql("create table if not exists public.ballast (n int)")
                stage.sql("drop table public.ballast")
            except psycopg.Error:
                return True
            return False

        eventually(fails, 60.0, what="the server meets the full disk")

    def _take_the_rest(self) -> None:
        with self._ballast.open("ab") as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * _STEP_BYTES)
                file.flush()

    def _bring_back(self, stage: Stage) -> None:
        """Start the server if it has given up, or hangs, as its service manager or its operator would.

        PostgreSQL 18's startup process, once in some dozens of times that it finds no room, says so and does
        not end, and its postmaster waits for it for ever.
        """
        hangs_at = time.monotonic() + _RECOVERY_S

        def answers() -> bool:
            nonlocal hangs_at
            if self._server.pid is not None and time.monotonic() > hangs_at:
                self._server.kill()
                stage.count("times the server hung in its own recovery")
                hangs_at = time.monotonic() + _RECOVERY_S
            elif self._server.pid is None:
                stage.count("times the server had given up")
            if self._server.pid is None:
                self._server.start()
            try:
                return stage.sql("select 1") == [(1,)]
            except psycopg.Error:
                return False

        try:
            eventually(answers, 3 * _RECOVERY_S, what="the server is back")
        except AssertionError as error:
            log = (self._server.data_dir / "server.log").read_text(errors="replace")
            raise AssertionError(f"{error}\n{log[-5000:]}") from error
