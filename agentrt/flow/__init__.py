"""Flow control: what keeps everything bounded. Pure: time comes in as ``now_ns``, randomness as an argument; no I/O, no
globals that change, no asyncio. The engine and the model gateway call it (see docs/flow-control.md)."""
