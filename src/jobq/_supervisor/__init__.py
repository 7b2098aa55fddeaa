"""The parent of worker processes: starts them, watches them, takes back what the dead ones held."""
