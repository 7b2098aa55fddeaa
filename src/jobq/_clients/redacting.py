"""``client.redaction``: which fields are hidden in output. Both colours run the same operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobq._clients.base import documented_by
from jobq._statements.redaction import (
    RedactedField,
    Redactions,
    add_redaction,
    read_redaction,
    remove_redaction,
)

if TYPE_CHECKING:
    from jobq._clients.base import AsyncRun, SyncRun


class AsyncRedacting:
    """Which fields of jobs are hidden when jobs are shown, beside those of telling names.

    Reached as ``client.redaction``. What kinds declare (``redact=…``) is there once a worker with them has
    started. Names count whatever their case and punctuation, at any depth of arguments, meta and results.
    """

    def __init__(self, run: AsyncRun, schema: str) -> None:
        self._run = run
        self._schema = schema

    async def fields(self) -> list[RedactedField]:
        """Return every field that was declared or added: those of all kinds first, then by kind."""
        return await self._run(read_redaction(self._schema))

    async def load(self) -> Redactions:
        """Return what makes jobs fit to be shown, as `jobqctl` shows them."""
        return Redactions(await self._run(read_redaction(self._schema)))

    async def add(
        self, *fields: str, kind: str | None = None, reason: str = "", by: str | None = None
    ) -> list[str]:
        """Hide fields from now on, of jobs that there are as well.

        Args:
            fields: their names.
            kind: of which kind's jobs; ``None`` for all.
            reason: why, for the operator log; at most 1,000 characters.
            by: who says so; the process's user and host when left out.

        Returns:
            Those that had not been added before.

        Raises:
            ConfigError: no name is given, or something that cannot be kept.
        """
        return await self._run(add_redaction(self._schema, fields, kind, reason, by))

    async def remove(
        self, *fields: str, kind: str | None = None, reason: str = "", by: str | None = None
    ) -> list[str]:
        """Take back what was said. What the code still declares comes back when a worker starts.

        Args:
            fields: their names, as they were given.
            kind: of which kind's jobs; ``None``: what was said for all.
            reason: why, for the operator log.
            by: who says so; the process's user and host when left out.

        Returns:
            Those that had been there.

        Raises:
            ConfigError: no name is given, or something that cannot be kept.
        """
        return await self._run(remove_redaction(self._schema, fields, kind, reason, by))


class Redacting:
    """Which fields of jobs are hidden when jobs are shown; see the async client's."""

    def __init__(self, run: SyncRun, schema: str) -> None:
        self._run = run
        self._schema = schema

    @documented_by(AsyncRedacting.fields)
    def fields(self) -> list[RedactedField]:
        return self._run(read_redaction(self._schema))

    @documented_by(AsyncRedacting.load)
    def load(self) -> Redactions:
        return Redactions(self._run(read_redaction(self._schema)))

    @documented_by(AsyncRedacting.add)
    def add(
        self, *fields: str, kind: str | None = None, reason: str = "", by: str | None = None
    ) -> list[str]:
        return self._run(add_redaction(self._schema, fields, kind, reason, by))

    @documented_by(AsyncRedacting.remove)
    def remove(
        self, *fields: str, kind: str | None = None, reason: str = "", by: str | None = None
    ) -> list[str]:
        return self._run(remove_redaction(self._schema, fields, kind, reason, by))
