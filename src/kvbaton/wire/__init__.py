"""The front door of every port of ours that peers reach: ZeroMQ's wire format, and connections with limits before trust."""
