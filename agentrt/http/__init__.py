"""The node's HTTP API. It knows the runtime; nothing below knows it."""
