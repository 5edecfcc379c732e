"""Ways to move runs of bytes between two ranks. `base` is the contract; each way has a room of its own."""
