"""Many memories per process, which come and go while peers read and write them: the exchange."""
