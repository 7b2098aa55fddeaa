"""A clock that a test moves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from jobq._errors import ConfigError


class Clock:
    """A clock that a test moves. Given to :func:`drain`, it decides what is due.

    Args:
        now: where it starts; the present by default.
    """

    def __init__(self, now: datetime | None = None) -> None:
        if now is not None and now.tzinfo is None:
            raise ConfigError("Clock(now=…): a datetime with a zone")
        self._offset = timedelta(0) if now is None else now - datetime.now(UTC)

    def now(self) -> datetime:
        """Return its time, which goes on by itself."""
        return datetime.now(UTC) + self._offset

    def advance(self, by: timedelta) -> None:
        """Move it forward."""
        if by < timedelta(0):
            raise ConfigError(f"Clock.advance({by}): forward only")
        self._offset += by
