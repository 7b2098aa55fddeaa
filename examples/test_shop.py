"""The shop's tests, with what jobq.testing gives: a database for each, and no worker to wait for.

The fixture `jobq_client` comes with jobq. Run them with ``pytest test_shop.py``.
"""

from __future__ import annotations

import smtplib
from datetime import timedelta
from decimal import Decimal
from email.message import EmailMessage
from typing import Self

import psycopg
import pytest
import shop

import jobq
from jobq.testing import Clock, assert_enqueued, drain_sync, make_job

ORDER = shop.Order(1001, "Ada", "ada@example.com", "teapot", 2, Decimal("19.90"))


class Post:
    """What stands for the mail server: it keeps what it is sent, or refuses."""

    def __init__(self) -> None:
        self.sent: list[EmailMessage] = []
        self.refusal: tuple[int, bytes] | None = None

    def __call__(self, *_: object, **__: object) -> Post:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send_message(self, mail: EmailMessage) -> None:
        if self.refusal is not None:
            raise smtplib.SMTPRecipientsRefused({mail["To"]: self.refusal})
        self.sent.append(mail)


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> Post:
    post = Post()
    monkeypatch.setattr(smtplib, "SMTP", post)
    return post


@pytest.fixture
def client(jobq_client: jobq.Client) -> jobq.Client:
    """A client whose database has the shop's own table, too."""
    with jobq_client.pool.connection() as connection:
        connection.execute(shop.CREATE_ORDERS)
    return jobq_client


def test_an_order_is_confirmed(client: jobq.Client, post: Post) -> None:
    shop.place_order(client, ORDER)
    assert_enqueued(client, shop.confirm_order, args=ORDER, queue="mail", count=1)
    assert post.sent == []  # nothing is sent before a worker, here drain_sync, gets to it
    drain_sync(client, shop.jobs)
    (mail,) = post.sent
    assert mail["To"] == "ada@example.com"
    assert "39.80 €" in mail.get_content()


def test_an_order_that_cannot_be_stored_sends_nothing(client: jobq.Client) -> None:
    shop.place_order(client, ORDER)
    with pytest.raises(psycopg.errors.UniqueViolation):
        shop.place_order(client, ORDER)  # the same number again
    assert_enqueued(client, shop.confirm_order, count=1)


def test_a_busy_mail_server_is_tried_again(client: jobq.Client, post: Post) -> None:
    shop.place_order(client, ORDER)
    clock = Clock()
    post.refusal = (451, b"busy")
    assert drain_sync(client, shop.jobs, clock=clock).retried
    clock.advance(timedelta(minutes=1))
    post.refusal = None
    assert drain_sync(client, shop.jobs, clock=clock).completed
    assert len(post.sent) == 1


def test_an_address_that_does_not_exist_is_not_tried_again(client: jobq.Client, post: Post) -> None:
    shop.place_order(client, ORDER)
    post.refusal = (550, b"no such mailbox")
    (job_id,) = drain_sync(client, shop.jobs).discarded
    assert client.errors(job_id)[0].message == "550 no such mailbox"


def test_every_attempt_has_the_same_message_id_so_that_a_mail_sent_twice_can_be_told(post: Post) -> None:
    shop.confirm_order(make_job(shop.confirm_order, id=7, attempt=1), ORDER)
    shop.confirm_order(make_job(shop.confirm_order, id=7, attempt=2), ORDER)
    assert {mail["Message-ID"] for mail in post.sent} == {"<7.order-1001@shop.example>"}
