"""The application of supervised workers: ``jobqctl worker tests.chaos.app:jobs``."""

from __future__ import annotations

import os

from tests.chaos.books import HandlerNotes
from tests.chaos.worker import make_jobs

jobs = make_jobs(HandlerNotes(f"{os.environ['JOBQ_CHAOS_NOTES']} {os.getpid()}.notes"))
