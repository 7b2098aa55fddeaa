"""How a worker process ends, told by its exit code: the supervisor decides by it what becomes of the jobs.

Codes under 64 are Python's and the user's own (an exception is 1). Ours stand where sysexits.h has its
own, so that nobody's `sys.exit(2)` is mistaken for them, and those of a fast exit follow the shell.
"""

from typing import Final

EXIT_BLOCKED: Final = 70
"""The event loop was blocked for longer than the worker was allowed to keep its jobs, so the process ended
itself. A handler is at fault: its jobs are rescued and the crash is counted against them."""

EXIT_LINGERING: Final = 75
"""The grace is over and handlers that ignore their cancellation still run. The process ends itself, for
only then is it certain that they do nothing more; the supervisor hands their jobs back, and no job pays."""

EXIT_CONFIG: Final = 78
"""The application could not be loaded, or its settings cannot work. Nothing was claimed; starting again
would end the same way, so the supervisor gives up unless the application has worked before."""

AT_ONCE_S: Final = 0.3
"""Two signals within this time are one: a launcher often signals the process, and then its whole group."""

FAST_EXIT_BASE: Final = 128
"""Plus the signal's number: a second signal asked for an end at once, as in `128 + SIGTERM = 143`."""
