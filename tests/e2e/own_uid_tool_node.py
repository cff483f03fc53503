"""A node of root: ``python own_uid_tool_node.py import|exec BASE`` says, as JSON, who its tool hosts are and what its
tools said, for two tenants."""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import own_uid_tools

from agentrt import Runtime
from agentrt.config import load_config


async def hears(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    said = await reader.read(100)
    writer.write(b"the right one" if said == b"open sesame" else b"?")
    writer.close()


async def main() -> None:
    mode, base = sys.argv[1:3]
    arguments = {"store.kind": "memory", "tools.uid_base": int(base), "tools.template": mode, "tools.spares": 0}
    slow = {"tools.start_timeout_ms": 300_000, "python.start_timeout_ms": 300_000}
    tools = [own_uid_tools.plain, own_uid_tools.looped, own_uid_tools.talks]
    with tempfile.TemporaryDirectory() as secrets:
        for tenant in ("one", "two"):
            (Path(secrets) / tenant).mkdir()
            (Path(secrets) / tenant / "key").write_text("open sesame")
            (Path(secrets) / tenant / "key").chmod(0o600)
        server = await asyncio.start_server(hears, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        config = load_config(env={}, arguments=arguments | slow | {"secrets.folder": secrets})
        async with Runtime(config=config, tools=tools) as runtime:
            await runtime.register(own_uid_tools.asks_who)
            said: dict[str, Any] = {}
            for tenant in ("one", "two"):
                run = await runtime.submit("asks_who", port, tenant=tenant)
                said[tenant] = await asyncio.wait_for(run.result(), 280)
            mode = (await runtime.statistics()).tools.start_mode
        server.close()
    folders = {each["folder"] for answers in said.values() for each in answers[:2]}
    async with asyncio.timeout(60):
        while any(map(os.path.exists, folders)):
            await asyncio.sleep(0.01)
    print(json.dumps({"said": said, "mode": mode}))


if __name__ == "__main__":
    asyncio.run(main())
