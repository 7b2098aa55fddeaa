"""Connection strings: read, completed, and shown without their password.

A mistake in one shows where it is given, as a mistake, and not when a connection is made, as a server
that cannot be reached.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import conninfo as psycopg_conninfo
from psycopg.pq import PGconn

from jobq._driver_errors import first_line
from jobq._errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Container

# A link that dies without a word (cable, firewall, virtual machine) is noticed by nobody until
# somebody writes: probes after 5 s of silence, dead after two more, 2 s apart; and written data
# that nobody acknowledges for 5 s breaks the connection too. libpq's own defaults are hours.
CONNECTION_DEFAULTS: Final = {
    "connect_timeout": "5",
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "2",
    "tcp_user_timeout": "5000",
}

# No socket can be in it, so that nothing is ever connected to.
_NOWHERE: Final = "/dev/null/jobq"
_MAX_C_INT: Final = 2**31 - 1
_MAX_SHOWN: Final = 200  # characters of a connection string that a message shows

# Up to the last @, for a password may have some that should have been escaped; where the @ was forgotten,
# what cannot be a port.
_URL_PASSWORD: Final = re.compile(r"(?s)^([^:]*://[^:/?@]*:)(.*(?=@)|[^/?@]*[^0-9/?@][^/?@]*)")
_SECOND_AT: Final = re.compile(r"(?s)^([^:]*://[^:/?@]*@)(.*)(?=@)")
# To the end: where an & of a password is not escaped, nobody knows where it ends.
_QUERY_PASSWORD: Final = re.compile(r"(?is)([?&](?:ssl)?password=)(.*)")
_PAIR_PASSWORD: Final = re.compile(r"(?is)((?:^|\s)(?:ssl)?password\s*=)(.*)")
_BARE_PASSWORD: Final = re.compile(r"(?s)^([^:]*:)(.*)(?=@)")
_QUOTED: Final = re.compile(r'"([^"]+)"')


def connection_string(conninfo: str, *, name: str) -> str:
    """Return a connection string with jobq's defaults for what it leaves open.

    Args:
        conninfo: a ``postgresql://`` URL or ``key=value`` pairs.
        name: what ``pg_stat_activity.application_name`` shows, unless the string or PGAPPNAME
            say otherwise.

    Raises:
        ConfigError: it cannot be read, or a value in it (or in libpq's environment) cannot be.
    """
    given = _read(conninfo)
    if _names_a_password(conninfo, given):
        raise ConfigError(
            f"the connection string {masked(conninfo)} has an @ too many: write those within a name or a"
            " password as %40, for a part of the password would be taken for the host"
        )
    problem = _number_problem(given) or _libpq_problem(given)
    if problem:
        raise ConfigError(f"the connection string {masked(conninfo)}: {_hide(problem, conninfo, given)}")
    defaults = dict(CONNECTION_DEFAULTS, client_encoding="utf8", fallback_application_name=name)
    if "PGCONNECT_TIMEOUT" in os.environ:
        del defaults["connect_timeout"]
    return psycopg_conninfo.make_conninfo("", **{**defaults, **given})


def masked(conninfo: str) -> str:
    """Return a connection string as a message may show it: quoted, cut, and without passwords."""
    for pattern in _passwords_of(conninfo):
        conninfo = pattern.sub(r"\1***", conninfo)
    shown = repr(conninfo)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"


def _passwords_of(conninfo: str) -> tuple[re.Pattern[str], ...]:
    # Of pairs, all that follows: where the string is malformed, nobody knows where the password ends.
    is_url = "://" in conninfo
    return (_URL_PASSWORD, _SECOND_AT, _QUERY_PASSWORD) if is_url else (_PAIR_PASSWORD, _BARE_PASSWORD)


def _read(conninfo: str) -> dict[str, Any]:
    shape = "write postgresql://user@host/name, or key=value pairs"
    if "\0" in conninfo:
        raise ConfigError(f"the connection string {masked(conninfo)} has a NUL character in it; {shape}")
    try:
        return psycopg_conninfo.conninfo_to_dict(conninfo)
    except UnicodeError:
        raise ConfigError(f"the connection string {masked(conninfo)} is no valid Unicode") from None
    except psycopg.Error as error:
        why = first_line(error).replace(conninfo, "…")
        if any(pattern.search(conninfo) for pattern in _passwords_of(conninfo)):
            why = re.sub(r'".*"', '"…"', why)  # libpq quotes what it stumbled over
        raise ConfigError(
            f"the connection string {masked(conninfo)} cannot be read: {why}; {shape}"
        ) from None


def _hide(problem: str, conninfo: str, options: Container[str]) -> str:
    """Leave out what a message quotes from a password: where one is not escaped, libpq reads it as more."""
    secrets = [found[2] for pattern in _passwords_of(conninfo) for found in pattern.finditer(conninfo)]

    def hide(quoted: re.Match[str]) -> str:
        is_secret = quoted[1] not in options and any(quoted[1] in secret for secret in secrets)
        return '"…"' if is_secret else quoted[0]

    return _QUOTED.sub(hide, problem)


def _names_a_password(conninfo: str, given: dict[str, Any]) -> bool:
    """Whether libpq takes a part of a password for the host, which its errors would name.

    It ends the password at the first @, and the host at the first slash after that.
    """
    if "://" not in conninfo:
        return False
    hosts = str(given.get("host") or "").split(",")  # one that begins with it is an abstract socket
    return conninfo.partition("?")[0].count("@") > 1 or any("@" in host[1:] for host in hosts)


def _number_problem(given: dict[str, Any]) -> str | None:
    """Say which number is none: libpq would look at these only once there is a server."""
    for name in CONNECTION_DEFAULTS:
        value = given.get(name)
        if value is not None and not re.fullmatch(r"\s*[+-]?[0-9]{1,10}\s*", str(value)):
            return f'{name}="{value}" is no whole number'
        if value is not None and abs(int(value)) > _MAX_C_INT:
            return f'{name}="{value}" is too large'
    return None


def _libpq_problem(given: dict[str, Any]) -> str | None:
    """Ask libpq, by having it connect to where nothing can be: 0.1 ms, and no packet is sent.

    It speaks the language of its locale, so the test is whether it came as far as the address.
    """
    hosts = max(len(str(given.get(name) or "").split(",")) for name in ("host", "hostaddr"))
    nowhere = {"host": ",".join([_NOWHERE] * hosts), "hostaddr": "", "gssencmode": given.get("gssencmode")}
    if "require" in (nowhere["gssencmode"], os.environ.get("PGGSSENCMODE")):
        nowhere["gssencmode"] = "prefer"  # a socket has none, which is no mistake of the string's
    probe = PGconn.connect_start(psycopg_conninfo.make_conninfo("", **{**given, **nowhere}).encode())
    try:
        said = probe.error_message.decode(errors="replace")
    finally:
        probe.finish()
    return None if _NOWHERE in said else said.strip().partition("\n")[0]
