"""The router's own HTTP/1.1: callbacks on the event loop instead of a task per request, which is where its speed comes from."""
