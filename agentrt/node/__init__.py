"""`agentrt serve`: one node from one configuration. It knows the runtime and the HTTP API; nothing below knows it."""
