"""What benches found (history.jsonl), and ``python -m bench``; the benches themselves are `jobq._bench`."""
