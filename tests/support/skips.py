"""A skip that nobody has listed is a failure: a test that cannot run here proves nothing.

tests/expected_skips.txt has one allowed skip a line: a node id, as pytest prints it, or a
pattern of ids, then ``#`` and the reason.
"""

from __future__ import annotations

import fnmatch
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

LIST: Final = Path(__file__).parents[1] / "expected_skips.txt"

ReportT = TypeVar("ReportT", pytest.TestReport, pytest.CollectReport)


@functools.cache
def expected_skips() -> tuple[str, ...]:
    """Return the patterns of the list."""
    lines = (line.partition("#") for line in LIST.read_text().splitlines() if not line.startswith("#"))
    entries = [(pattern.strip(), reason.strip()) for pattern, _, reason in lines if pattern.strip()]
    unexplained = [pattern for pattern, reason in entries if not reason]
    assert not unexplained, f"{LIST.name}: give a reason for {unexplained}"
    return tuple(pattern for pattern, _ in entries)


def fail_unlisted_skip(report: ReportT) -> ReportT:
    """Turn the report of a skip that is not listed into a failure."""
    is_xfail = hasattr(report, "wasxfail")
    if not report.skipped or is_xfail or any(fnmatch.fnmatchcase(report.nodeid, p) for p in expected_skips()):
        return report
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: skipped ({reason}), and tests/{LIST.name} does not list it"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return fail_unlisted_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return fail_unlisted_skip((yield))
