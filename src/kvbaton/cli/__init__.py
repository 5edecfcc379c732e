"""The `kvbaton` command. Nobody imports this room."""
