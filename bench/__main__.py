"""``python -m bench NAME …``: what ``jobqctl bench`` does, in a checkout."""

from __future__ import annotations

from jobq._bench.__main__ import main

if __name__ == "__main__":  # a measured process imports this module again, and must not start over
    raise SystemExit(main())
