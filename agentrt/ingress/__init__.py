"""Doors for a bus: events become runs, each exactly one, acknowledged once that is durable."""
