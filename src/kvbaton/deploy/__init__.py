"""kvbaton inside systems that start and scale servers: each module needs an extra of its own, and imports it where used."""
