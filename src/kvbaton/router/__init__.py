"""The OpenAI-compatible P/D router and its page: it chooses a pair of instances per request, and runs prefill and decode."""
