"""The application of a load that is held for long: ``jobqctl worker tests.chaos.steady_app:jobs``.

The handlers of the chaos, which count instead of noting, and a schedule that ticks every second.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta

from tests.chaos import leaks
from tests.chaos.books import HandlerLedger
from tests.chaos.reckoning import SCHEDULE
from tests.chaos.worker import SentOnceTooEarlyError, make_jobs


def _is_news(record: logging.LogRecord) -> bool:
    """Say whether a line tells more than that a job failed which was to fail: there would be millions."""
    return SentOnceTooEarlyError.__name__ not in record.getMessage()


logging.getLogger("jobq.worker").addFilter(_is_news)
jobs = make_jobs(HandlerLedger(f"{os.environ['JOBQ_CHAOS_LEDGER']} {os.getpid()}.ledger"))
jobs.add_periodic(
    SCHEDULE, "work", {"do": "work", "s": 0.0, "at": None}, every=timedelta(seconds=1), catch_up="all"
)
if leak := os.environ.get("JOBQ_CHAOS_LEAK"):
    jobs.use(leaks.LEAKS[leak])
