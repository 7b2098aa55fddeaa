"""Files for the type checkers, see `test_typing.py`."""
