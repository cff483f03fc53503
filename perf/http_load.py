"""Load over HTTP where there is no wrk: ``python -m perf.http_load PORT KEY CONNECTIONS SECONDS BODY`` prints
[requests, seconds, p99_ms, failed]."""

import asyncio
import json
import sys
import time

import uvloop

from agentrt.demo.figures import percentile


async def _connection(port: int, request: bytes, end_s: float, times_ms: list[float]) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    failed = 0
    while time.monotonic() < end_s:
        began = time.perf_counter_ns()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        times_ms.append((time.perf_counter_ns() - began) / 1e6)
        failed += not head.startswith(b"HTTP/1.1 2")
    writer.close()
    return failed


async def main(port: int, key: str, connections: int, seconds: float, body: str) -> None:
    request = (
        f"POST /v1/runs HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()
    times_ms: list[float] = []
    began_s = time.monotonic()
    work = (_connection(port, request, began_s + seconds, times_ms) for _ in range(connections))
    failed = sum(await asyncio.gather(*work))
    print(json.dumps([len(times_ms), time.monotonic() - began_s, percentile(times_ms, 99), failed]))


if __name__ == "__main__":
    port, key, connections, seconds, body = sys.argv[1:]
    uvloop.run(main(int(port), key, int(connections), float(seconds), body))
