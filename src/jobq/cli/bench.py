"""``jobqctl bench``: how fast jobq is here, beside what PostgreSQL itself can do."""

from __future__ import annotations

import sys
from typing import Any, Final

import click

_PASS_ON: Final[dict[str, Any]] = {"ignore_unknown_options": True, "help_option_names": []}


@click.command(context_settings=_PASS_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure jobq beside what PostgreSQL itself can do.

    Works on a PostgreSQL of its own, started for it and removed afterwards, never on yours.
    --help lists the benches. --quick takes under half a minute for most of them.
    """
    from jobq._bench.__main__ import main  # noqa: PLC0415 - what it needs no other command does

    sys.exit(main(arguments or ("--help",), program="jobqctl bench"))
