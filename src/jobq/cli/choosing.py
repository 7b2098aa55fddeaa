"""Which jobs a command is about: ids, or what they have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from jobq._statements.filter import JobFilter
from jobq._types import JobState
from jobq.cli.parsing import parse_length

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., object]")

_OPTIONS = (
    click.option("--queue", "queues", multiple=True, help="In this queue; may be repeated."),
    click.option("--kind", "kinds", multiple=True, help="Of this kind; may be repeated."),
    click.option(
        "--state",
        "states",
        multiple=True,
        type=click.Choice([state.value for state in JobState]),
        help="In this state; may be repeated.",
    ),
    click.option("--tag", "tags", multiple=True, help="With this tag; with all of them, when repeated."),
    click.option(
        "--older-than",
        callback=parse_length,
        metavar="TIME",
        help="Ended, or was enqueued if it has not, longer ago: 90s, 15m, 2h, 7d.",
    ),
    click.option("--newer-than", callback=parse_length, metavar="TIME", help="…less long ago: 10m, 1d."),
    click.option("--error", metavar="TEXT", help="With this text in its last error."),
    click.option("--worker", type=int, metavar="ID", help="That this worker runs, or ran last."),
)
_NAMES = ("queues", "kinds", "states", "tags", "older_than", "newer_than", "error", "worker")


def filter_options(command: F) -> F:
    """Give a command the options that :func:`take_filter` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_filter(given: dict[str, Any], ids: tuple[int, ...] = ()) -> JobFilter:
    """Take the options of a filter out of a command's, and return the filter.

    Raises:
        ConfigError: names what cannot be.
    """
    values = {name: given.pop(name) for name in _NAMES}
    return JobFilter(ids=ids or None, **values)
