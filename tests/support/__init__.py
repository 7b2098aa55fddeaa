"""What the tests are made with; see tests/README.md."""
