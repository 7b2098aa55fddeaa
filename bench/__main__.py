"""``python -m bench NAME …``: what ``jobqctl bench`` does, in a checkout, where the results are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from jobq._bench.__main__ import main

HISTORY: Final = Path(__file__).with_name("history.jsonl")

if __name__ == "__main__":  # a measured process imports this module again, and must not start over
    raise SystemExit(main(record=HISTORY))
