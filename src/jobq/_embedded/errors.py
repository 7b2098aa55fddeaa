"""What can go wrong around an embedded server."""

from __future__ import annotations

from jobq._errors import Error


class EmbeddedError(Error):
    """Root of what an embedded server raises: it could not be made, started or stopped."""


class BinariesNotFound(EmbeddedError):
    """No usable PostgreSQL programs were found; the message lists where they were sought."""


class ServerFailed(EmbeddedError):
    """A server program failed; the message ends with the last lines of its log."""
