"""A node of root: ``python own_uid_node.py`` says, as JSON, who its hosts of Python agents are, and what a run said."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import own_uid_agents

from agentrt import Runtime
from agentrt.config import load_config


def hosts() -> list[list[str]]:
    """Uid, Gid and Groups, as in /proc/PID/status, of the children of this process's templates."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            command, status = (entry / "cmdline").read_bytes(), (entry / "status").read_text()
        except OSError:
            continue
        if b"agentrt.agents.template" in command:
            fields = dict(line.split(":", 1) for line in status.splitlines())
            ids = [fields[name].strip() for name in ("Uid", "Gid", "Groups")]
            found[int(entry.name)] = (int(fields["PPid"]), ids)
    templates = {pid for pid, (parent, _) in found.items() if parent == os.getpid()}
    return sorted(ids for parent, ids in found.values() if parent in templates)


async def main() -> None:
    config = load_config(env={}, arguments={"store.kind": "memory", "python.spares": 1})
    async with Runtime(config=config) as runtime:
        await runtime.register(own_uid_agents.divides)
        said: Any = await asyncio.wait_for((await runtime.submit("divides", 7)).result(), 100)
        while len(hosts()) < 2:  # the spare
            await asyncio.sleep(0.01)
        print(json.dumps({"said": said, "hosts": hosts()}))


if __name__ == "__main__":
    asyncio.run(main())
