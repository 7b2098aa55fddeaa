"""Python objects to JSON documents and back, without a change that nobody sees."""
