"""The application of the documentation's examples: ``myapp.jobs``."""

from __future__ import annotations

from dataclasses import dataclass

import jobq

jobs = jobq.Jobs()


@dataclass(frozen=True)
class EmailArgs:
    to: str


@dataclass(frozen=True)
class ReportArgs:
    month: int = 1


@jobs.handler("send_email")
async def send_email(job: jobq.Job, args: EmailArgs) -> None:
    """Send one e-mail."""


@jobs.handler("report", queue="reports")
def report(job: jobq.Job, args: ReportArgs) -> None:
    """Write one report."""
