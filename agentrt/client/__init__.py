"""The client of a node's HTTP API: `Client` for plain threads, `AsyncClient` for asyncio."""

from agentrt.client.clients import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
