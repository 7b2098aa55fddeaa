"""The options that say which queue a command looks at, and the client for it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from jobq._clients.client import Client
from jobq.cli.common import DSN_OPTION, SCHEMA_OPTION, explain_errors, require_dsn

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")


def with_client(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command ``--dsn`` and ``--schema``, and an open client as its first argument."""

    @DSN_OPTION
    @SCHEMA_OPTION
    @functools.wraps(command)
    @explain_errors
    def connected(*args: Any, dsn: str | None, schema: str, **kwargs: Any) -> R:
        with Client(require_dsn(dsn), schema=schema, pool_max_size=1) as client:
            client.check_schema()
            return command(client, *args, **kwargs)

    return connected
