"""Real servers of one engine beside each other: one alone, kvbaton's pairs, and a pair of another connector."""
