"""jobq: background jobs kept in PostgreSQL."""

__version__ = "0.1.0"
