"""The `kvbaton` command. No other package imports this one."""
