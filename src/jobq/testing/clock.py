"""A clock that a test moves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import cast

from jobq._errors import ConfigError
from jobq._messages import shown


class Clock:
    """A clock that a test moves. Given to :func:`drain`, it decides what is due.

    Args:
        now: where it starts; the present by default.
    """

    def __init__(self, now: datetime | None = None) -> None:
        if now is not None and (not isinstance(cast("object", now), datetime) or now.tzinfo is None):
            raise ConfigError(f"Clock(now={shown(now)}): a datetime with a zone")
        self._offset = timedelta(0) if now is None else now - datetime.now(UTC)

    def now(self) -> datetime:
        """Return its time, which goes on by itself."""
        return datetime.now(UTC) + self._offset

    def advance(self, by: timedelta) -> None:
        """Move it forward."""
        if not isinstance(cast("object", by), timedelta) or by < timedelta(0):
            raise ConfigError(f"Clock.advance({shown(by)}): a timedelta, forward only")
        self._offset += by
