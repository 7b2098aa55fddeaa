"""Plans: every hot statement goes straight to its rows, whatever the statistics say (being written)."""
