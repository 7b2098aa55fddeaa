"""A mail server on this machine that turns some addresses away, and remembers all that it took."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from aiosmtpd.smtp import SMTP

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType
    from typing import Self

    from aiosmtpd.smtp import Envelope, Session

BUSY_DOMAIN: Final = "busy.example"
GONE_DOMAIN: Final = "gone.example"
BUSY_FOR_S: Final = 1.5  # after a busy address was first tried
_CALL_TIMEOUT_S: Final = 10.0
_TAKES_S: Final = 0.02  # what a server on the network might need for one e-mail
_ORDER: Final = re.compile(rb"^Message-ID:\s*<\d+\.order-(\d+)@", re.MULTILINE | re.IGNORECASE)


class MailServer:
    """Listens on a free port of 127.0.0.1, in a thread of its own.

    Attributes:
        received: how many times the e-mail of each order was accepted: what really went out.
        refused: addresses that were turned away for good.
        port: where it listens.
    """

    def __init__(self) -> None:
        self.received: Counter[int] = Counter()
        self.refused: set[str] = set()
        self._first_tried: dict[str, float] = {}
        self._listener: asyncio.Server | None = None
        self.port = 0

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mail server", daemon=True)
        self._thread.start()
        self._call(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, step: Coroutine[object, object, None]) -> None:
        asyncio.run_coroutine_threadsafe(step, self._loop).result(_CALL_TIMEOUT_S)

    async def _open(self) -> None:
        self._listener = await self._loop.create_server(
            lambda: SMTP(self, hostname="mail.example", loop=self._loop), "127.0.0.1", 0
        )
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        conversations = asyncio.all_tasks() - {asyncio.current_task()}
        for task in conversations:
            task.cancel()
        await asyncio.gather(*conversations, return_exceptions=True)

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name
        self, _server: SMTP, _session: Session, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        """Answer whether this address gets e-mail today."""
        domain = address.rpartition("@")[2]
        if domain == GONE_DOMAIN:
            self.refused.add(address)
            return "550 5.1.1 no such mailbox"
        now = time.monotonic()
        if domain == BUSY_DOMAIN and now < self._first_tried.setdefault(address, now) + BUSY_FOR_S:
            return "451 4.7.1 busy, try again later"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802
        """Take an e-mail."""
        await asyncio.sleep(_TAKES_S)
        content = envelope.content
        order = _ORDER.search(content) if isinstance(content, bytes) else None
        if order is None:
            return "554 5.6.0 no order of this shop"
        self.received[int(order[1])] += 1
        return "250 OK"
