"""``jobqctl migrate``: bring the schema up to date, or say what that would take."""

from __future__ import annotations

import click

from jobq._clients import migrate as _migrate
from jobq._messages import migrate_advice
from jobq.cli.common import DSN_OPTION, EXIT_PENDING, SCHEMA_OPTION, explain_errors, require_dsn


@click.command()
@DSN_OPTION
@SCHEMA_OPTION
@click.option("--check", is_flag=True, help="Change nothing; exit with 3 when migrations are pending.")
@click.option("--sql", is_flag=True, help="Print the SQL of all migrations, for psql.")
@click.pass_context
@explain_errors
def migrate(context: click.Context, dsn: str | None, schema: str, *, check: bool, sql: bool) -> None:
    """Bring the database's schema up to what this version of jobq needs.

    Safe at any time, by any number of processes at once, while workers run.
    """
    if check and sql:
        raise click.UsageError("--check and --sql: one of them at a time.")
    if sql:
        click.echo(_migrate.migration_script(schema), nl=False)
        return
    where = require_dsn(dsn)
    if check:
        missing = _migrate.pending(where, schema=schema)
        _tell("pending", missing, schema)
        if missing:
            click.echo(f"To apply them, {migrate_advice(schema)}.")
            context.exit(EXIT_PENDING)
        return
    _tell("applied", _migrate.migrate(where, schema=schema), schema)


def _tell(what: str, names: list[str], schema: str) -> None:
    for name in names:
        click.echo(f"{what}: {name}")
    if not names:
        click.echo(f'The schema "{schema}" is up to date.')
