"""A shop: each order is stored, and its e-mail enqueued, in one transaction. Both exist, or neither.

This is the application behind `make demo`, and a good place to start reading. It also runs by itself,
with a PostgreSQL and a mail server of yours:

    export DATABASE_URL=postgresql://localhost/shop SMTP_HOST=localhost SMTP_PORT=25
    python shop.py orders.csv                      # stores the orders and enqueues the e-mails
    jobqctl worker shop:jobs --queue mail=20       # delivers them
"""

from __future__ import annotations

import csv
import dataclasses
import os
import smtplib
import sys
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from email.message import EmailMessage
from pathlib import Path

import jobq

jobs = jobq.Jobs()

CREATE_ORDERS = """
create table if not exists orders (
    number   integer primary key,
    customer text not null,
    email    text not null,
    item     text not null,
    quantity integer not null,
    price    numeric not null
)
"""
INSERT_ORDER = "insert into orders values (%s, %s, %s, %s, %s, %s)"


@dataclass(frozen=True)
class Order:
    """One line of orders.csv; also the arguments of the job that confirms it."""

    number: int
    customer: str
    email: str
    item: str
    quantity: int
    price: Decimal


@jobs.handler(
    "confirm_order",
    queue="mail",
    max_attempts=10,
    timeout=timedelta(seconds=30),
    backoff=jobq.ExponentialBackoff(base=timedelta(seconds=1), cap=timedelta(minutes=10)),
)
def confirm_order(job: jobq.Job, order: Order) -> None:
    """Send the e-mail. A sync function: it runs in a thread, and may block."""
    mail = confirmation(order)
    # The same in every attempt: whoever receives a mail twice can tell.
    mail["Message-ID"] = f"<{job.id}.order-{order.number}@shop.example>"
    host, port = os.environ.get("SMTP_HOST", "localhost"), int(os.environ.get("SMTP_PORT", "25"))
    with smtplib.SMTP(host, port, timeout=10) as server:
        try:
            server.send_message(mail)
        except smtplib.SMTPRecipientsRefused as refusal:
            code, reason = refusal.recipients[order.email]
            if code >= 500:  # for good: no such mailbox
                raise jobq.Permanent(f"{code} {reason.decode()}") from refusal
            raise  # for now: an exception means that jobq tries again later


def confirmation(order: Order) -> EmailMessage:
    """Write the e-mail."""
    mail = EmailMessage()
    mail["From"] = "orders@shop.example"
    mail["To"] = order.email
    mail["Subject"] = f"Your order {order.number}"
    total = order.quantity * order.price
    mail.set_content(
        f"Dear {order.customer},\n\nwe are packing {order.quantity} × {order.item}: {total} €.\n"
    )
    return mail


def place_order(client: jobq.Client, order: Order) -> None:
    """Store the order and enqueue its e-mail."""
    with client.pool.connection() as connection, connection.transaction():
        connection.execute(INSERT_ORDER, dataclasses.astuple(order))
        client.enqueue(confirm_order, order, tx=connection)  # exists only if this transaction commits


def read_orders(path: Path) -> list[Order]:
    """Read a file of orders."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Order(
                number=int(line["number"]),
                customer=line["customer"],
                email=line["email"],
                item=line["item"],
                quantity=int(line["quantity"]),
                price=Decimal(line["price"]),
            )
            for line in csv.DictReader(file)
        ]


def main() -> None:
    """Place the orders of a file."""
    with jobq.Client(os.environ["DATABASE_URL"]) as client:
        client.migrate()  # safe at every start
        with client.pool.connection() as connection:
            connection.execute(CREATE_ORDERS)
        for order in read_orders(Path(sys.argv[1])):
            place_order(client, order)


if __name__ == "__main__":
    main()
