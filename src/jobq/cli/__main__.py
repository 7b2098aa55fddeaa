"""``python -m jobq.cli`` is ``jobqctl``."""

from jobq.cli import main

main()
