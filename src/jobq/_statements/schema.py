"""What a database holds under the schema's name, and what this code needs there."""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import Final, NamedTuple, cast

from jobq._errors import ConfigError, SchemaError, SchemaMissing, SchemaOutdated, SchemaTooNew
from jobq._messages import migrate_advice, shown
from jobq._operation import Call, Operation, in_schema

OLDEST_SERVER: Final = 140000
MIGRATIONS_FOLDER = "migrations"

_FORBIDDEN_IN_NAME: Final = re.compile(r"""["'`\\%{}$\x00-\x1f\x7f]""")
_HEADER: Final = re.compile(r"^-- compatible_from: (\d+)$", re.MULTILINE)


class Migration(NamedTuple):
    """One step of the schema.

    Attributes:
        version: its number, from 1.
        name: its file's name without the suffix.
        compatible_from: the oldest code version that can serve the schema after it.
        template: its SQL, with ``{schema}`` where the schema's name goes.
    """

    version: int
    name: str
    compatible_from: int
    template: str


class SchemaStatus(NamedTuple):
    """What a database says about its jobq schema.

    Attributes:
        database: the database's name.
        version: the newest migration applied, 0 for none.
        compatible_from: the oldest code version that can serve it, 0 for none.
        server_version: as in ``server_version_num``, for example 150004.
        encoding: the database's encoding.
        schema_exists: whether a schema of that name exists, even an empty one.
    """

    database: str
    version: int
    compatible_from: int
    server_version: int
    encoding: str
    schema_exists: bool


def validate_schema_name(schema: str) -> str:
    """Return the name when it can be a jobq schema's.

    Raises:
        ConfigError: it is empty, longer than 63 bytes, starts with ``pg_``, or has a quote,
            control character, backslash, percent sign, dollar sign or brace in it.
    """
    name = str.__str__(schema) if isinstance(cast("object", schema), str) else ""
    if not name:
        raise ConfigError(f"schema={shown(schema)}: the name of a PostgreSQL schema, such as 'jobq'")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"schema={shown(schema)}: no valid Unicode") from None
    if size > 63:
        raise ConfigError(f"schema={shown(schema)}: {size} bytes; PostgreSQL's names end at 63")
    if _FORBIDDEN_IN_NAME.search(name):
        raise ConfigError(
            f"schema={name!r}: a schema's name has no quotes, control characters, backslashes, "
            "or any of % $ { } in it"
        )
    if name.startswith("pg_"):
        raise ConfigError(f"schema={name!r}: PostgreSQL keeps names that start with pg_ for itself")
    return name


def all_migrations() -> tuple[Migration, ...]:
    """Return the migrations that this code carries, oldest first."""
    return _read_migrations(MIGRATIONS_FOLDER)


@functools.cache
def _read_migrations(folder: str) -> tuple[Migration, ...]:
    found: list[Migration] = []
    for file in resources.files("jobq").joinpath(folder).iterdir():
        if match := re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name):
            template = file.read_text(encoding="utf-8")
            header = _HEADER.search(template)
            if header is None:
                raise ConfigError(f"migration {file.name} lacks its line '-- compatible_from: N'")
            found.append(Migration(int(match[1]), file.name.removesuffix(".sql"), int(header[1]), template))
    return tuple(sorted(found))


def code_version() -> int:
    """Return the schema version that this code needs."""
    return all_migrations()[-1].version


_STATUS: Final = """
select current_database(),
       exists (select 1 from pg_catalog.pg_namespace where nspname = {schema_name}),
       exists (select 1 from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
               where n.nspname = {schema_name} and c.relname = 'schema_version'),
       current_setting('server_version_num')::int4, current_setting('server_encoding')
"""

_VERSION: Final = "select version, compatible_from from {schema}.schema_version order by version desc limit 1"


def read_status(schema: str) -> Operation[SchemaStatus]:
    """Ask a database for its jobq schema's version."""
    rows = yield Call(in_schema(_STATUS, schema))
    database, schema_exists, has_table, server_version, encoding = rows[0]
    version = compatible_from = 0
    if has_table:
        rows = yield Call(in_schema(_VERSION, schema))
        version, compatible_from = rows[0] if rows else (0, 0)
    return SchemaStatus(database, version, compatible_from, server_version, encoding, schema_exists)


def check_schema(schema: str) -> Operation[None]:
    """Make sure that this code can serve the schema as it is.

    Raises:
        SchemaMissing, SchemaOutdated, SchemaTooNew: it cannot; the message says what to run.
    """
    status = yield from read_status(schema)
    where = f'schema "{schema}" in database "{status.database}"'
    run_this = migrate_advice(schema)
    if status.version == 0:
        raise SchemaMissing(f"there is no jobq {where}: {run_this}")
    if status.version < code_version():
        raise SchemaOutdated(
            f"{where} is at version {status.version}, and this jobq needs {code_version()}: {run_this}"
        )
    refuse_too_new(schema, status)


def refuse_too_new(schema: str, status: SchemaStatus) -> None:
    """Raise SchemaTooNew when the schema has moved past this code."""
    if status.compatible_from > code_version():
        raise SchemaTooNew(
            f'schema "{schema}" in database "{status.database}" is at version {status.version}, which serves '
            f"code from version {status.compatible_from} on; this jobq is at {code_version()}: upgrade jobq"
        )


def refuse_server(status: SchemaStatus) -> None:
    """Raise SchemaError when no version of this code's schema can live in such a database."""
    if status.server_version < OLDEST_SERVER:
        major, minor = divmod(status.server_version, 10000)
        raise SchemaError(f"the server is PostgreSQL {major}.{minor}; jobq needs 14 or newer")
    if status.encoding != "UTF8":
        raise SchemaError(
            f'database "{status.database}" is encoded as {status.encoding}; jobq needs UTF8 '
            "(create database … encoding 'UTF8' template template0)"
        )
