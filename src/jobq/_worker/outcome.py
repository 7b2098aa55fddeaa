"""What the executor hands to the completer: how one claimed job ended."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from jobq._statements.outcomes import Settlement


class Completion(NamedTuple):
    """A job that completed; ``result`` is JSON text where it is to be stored."""

    job_id: int
    attempt: int
    result: str | None = None


Outcome: TypeAlias = Completion | Settlement
