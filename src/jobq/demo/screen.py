"""What the demonstration shows: a live bar on a terminal, a few lines in a pipe, and a table at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from jobq.demo.tally import Tally

_WIDE: Final = 90  # columns from which there is room for explanations
_PIPED_STEPS: Final = 4


class Screen:
    """Prints; as a context manager, shows the progress meanwhile.

    Args:
        total: how many orders there are.
    """

    def __init__(self, total: int) -> None:
        self._console = Console(highlight=False, soft_wrap=False)
        self._total = total
        self._shown = 0
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn())
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._stored: TaskID = self._progress.add_task("orders stored", total=total)
        self._done: TaskID = self._progress.add_task("e-mails done", total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a paragraph, above the bars."""
        self._console.print(text, markup=False)

    def show(self, *, stored: int, done: int) -> None:
        """Move the bars; in a pipe, print a line at each quarter."""
        self._progress.update(self._stored, completed=stored)
        self._progress.update(self._done, completed=done)
        step = done * _PIPED_STEPS // max(self._total, 1)
        if not self._console.is_terminal and step > self._shown:
            self._shown = step
            self.say(f"  {stored} orders stored, {done} e-mails done")

    def result(self, tally: Tally, seconds: float) -> None:
        """Print the table."""
        rows = (
            ("enqueued", tally.enqueued, "orders stored, each with its e-mail, in one transaction"),
            ("delivered", tally.delivered, "accepted by the mail server"),
            ("retried", tally.retried, "turned away for a while (4xx), tried again later"),
            ("refused for good", tally.refused, "turned away for good (5xx), not tried again"),
            ("recovered from the dead worker", tally.recovered, "it held them; others did them"),
            ("delivered twice", tally.twice, "killed between sending and saying so: at least once"),
            ("lost", tally.lost, "orders without an outcome"),
        )
        is_wide = self._console.width >= _WIDE
        table = Table(title=f"{self._total} orders in {seconds:.0f} s", title_justify="left")
        table.add_column("e-mails")
        table.add_column("", justify="right")
        if is_wide:
            table.add_column("what that means")
        for name, count, meaning in rows:
            table.add_row(name, f"{count:,}", *([meaning] if is_wide else []))
        self._console.print(table)
        self.say(f"lost: {tally.lost}")
