"""jobq's tests."""
