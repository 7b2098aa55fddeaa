"""The two clients, and what connections they use: their own, or the caller's."""
