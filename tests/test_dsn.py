"""Connection strings: what is wrong with one is told where it is given, and its password never."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jobq
from jobq._dsn import connection_string, masked

SECRET = "Tr0ub4dor"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "write postgresql://user@host/name"),
        ("mysql://h/d", "write postgresql://user@host/name"),
        ("postgresql://h/d?no_such_option=1", "no_such_option"),
        ("postgresql://h:port/d", "port"),
        ("postgresql://h:99999/d", "99999"),
        ("host=a,b port=1,2,3", "3"),
        ("sslmode=perhaps", "perhaps"),
        ("target_session_attrs=any-way", "any-way"),
        ("service=of-nobody", "of-nobody"),
        ("connect_timeout=soon", 'connect_timeout="soon" is no whole number'),
        ("keepalives_idle=99999999999", "is no whole number"),
        ("tcp_user_timeout=9999999999", "is too large"),
        ("dbname=a\0b", "NUL"),
        ("user=\udcff", "no valid Unicode"),
    ],
)
def test_a_mistake_is_a_config_error_wherever_the_string_is_given(text: str, says: str) -> None:
    for refuse in (
        jobq.Client,
        jobq.AsyncClient,
        jobq.migrate,
        lambda dsn: jobq.Client("", listen_dsn=dsn),
    ):
        with pytest.raises(jobq.ConfigError, match="the connection string") as caught:
            refuse(text)
        assert says in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


def test_a_mistake_in_libpqs_environment_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPORT", "many")
    with pytest.raises(jobq.ConfigError, match="many"):
        jobq.Client("")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "postgresql://",
        "postgresql://u:p@h,h2:5433/d?target_session_attrs=primary",
        "host=a,b hostaddr=127.0.0.1,127.0.0.2 port=5432",
        "host=h sslmode=require connect_timeout=3",
        "gssencmode=require host=h",
        "hostaddr=127.0.0.1 keepalives=0",
        "host=/tmp port=5433",
        "host=@abstract",
        "postgresql:///d?host=@abstract,h",
        "postgresql://u%40x:p%40q@h/d",
    ],
)
def test_what_libpq_takes_is_taken(text: str) -> None:
    assert connection_string(text, name="jobq")


def test_nothing_is_connected_to_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOSTADDR", "192.0.2.1")  # nobody answers there
    assert connection_string("connect_timeout=60", name="jobq")


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://u:{SECRET}@h:port/d",
        f"postgresql://u:{SECRET}@[::1/d",
        f"postgresql://u:{SECRET}%zz@h/d",
        f"postgresql://u:{SECRET}/x@h/d",
        f"postgresql://u:a@{SECRET}@h:port/d",
        f"postgresql://u:{SECRET}",
        f"postgresql+psycopg://u:{SECRET}@h/d",
        f" postgresql://u:{SECRET}@h/d",
        f"postgresql:u:{SECRET}@h/d",
        f"u:{SECRET}@h",
        f"postgresql://h:port/d?password={SECRET}",
        f"postgresql://h/d?sslpassword={SECRET}&nonsense=1",
        f"port=x password={SECRET}",
        f"password=my {SECRET} dbname=x",
        f"password = '{SECRET}",
        f"sslpassword={SECRET} port=x",
        f'password=a"{SECRET}" "{SECRET} x',
    ],
)
def test_no_message_shows_a_password(text: str) -> None:
    with pytest.raises(jobq.ConfigError) as caught:
        connection_string(text, name="jobq")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None, "it would be shown by a traceback"
    assert "***" in str(caught.value)


@given(st.text())
def test_any_text_is_taken_or_refused_by_a_config_error(text: str) -> None:
    try:
        connection_string(text, name="jobq")
    except jobq.ConfigError as error:
        assert len(str(error)) < 1000  # noqa: PT017 - it need not be raised


@given(st.text(st.characters(exclude_characters="@/?:&", exclude_categories=["Cs"]), min_size=5))
def test_a_masked_url_has_no_password_and_all_else(password: str) -> None:
    shown = masked(f"postgresql://somebody:{password}@host:5432/database")
    assert shown == "'postgresql://somebody:***@host:5432/database'"
