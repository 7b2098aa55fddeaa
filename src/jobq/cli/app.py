"""The program: its commands, one module each."""

from __future__ import annotations

import click

from jobq import __version__
from jobq.cli.demo import demo
from jobq.cli.doctor import doctor
from jobq.cli.enqueue import enqueue
from jobq.cli.migrate import migrate
from jobq.cli.show import show
from jobq.cli.worker import worker


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="jobqctl")
def app() -> None:
    """Background jobs in PostgreSQL: run workers, and look after the database.

    Exit codes: 0 fine, 1 failed, 2 wrong usage, 3 migrations are pending (migrate --check).
    """


app.add_command(demo)
app.add_command(doctor)
app.add_command(enqueue)
app.add_command(migrate)
app.add_command(show)
app.add_command(worker)
