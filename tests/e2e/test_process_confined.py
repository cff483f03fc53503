"""Agents as programs are kept inside, as all native processes: what one can reach, and what it cannot."""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_kit import process_node

from agentrt import process_client
from agentrt.backends.process.agents.command import Command

PYTHON = shutil.which("python3", path="/usr/bin:/bin")
CODE = """
import os, socket
from process_client import serve

def tried(what):
    try:
        what()
    except OSError as error:
        return type(error).__name__
    return "done"

def agent(ctx, input):
    doubled = ctx.tool("double", x=1)
    with open("own", "w") as file:
        file.write("x")
    return {
        "doubled": doubled,
        "own": os.listdir("."),
        "network": tried(lambda: socket.create_connection(("127.0.0.1", input["port"]), 5)),
        "node": tried(lambda: os.kill(input["node"], 0)),
        "secret": tried(lambda: open(input["secret"]).close()),
        "outside": tried(lambda: open(input["outside"], "w").close()),
        "given": tried(lambda: open(input["given"], "w").close()),
        "proc": tried(lambda: open(f"/proc/{input['node']}/environ").close()),
    }

serve(agent)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="agentrt-confined-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_a_confined_program_reaches_what_it_was_given(folder: Path) -> None:
    if PYTHON is None:
        pytest.skip("no Python of the system's own")
    code = folder / "code"
    code.mkdir()
    (code / "agent.py").write_text(CODE)
    shutil.copy(process_client.__file__, code / "process_client.py")
    (folder / "secret").write_text("x")
    (folder / "given").mkdir()
    (folder / "given").chmod(0o777)

    async def main() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with process_node(confined=True) as node:
            if node.backend._launcher.refusal is not None:
                pytest.skip(str(node.backend._launcher.refusal))
            command = Command((PYTHON or "", str(code / "agent.py")), read=(str(code),), write=(str(folder / "given"),))
            names = {name: str(folder / name) for name in ("secret", "outside")}
            given = {"port": port, "node": os.getpid(), "given": str(folder / "given" / "file"), **names}
            said = await (await node.start(command, given)).result()
        server.close()
        refused = {"PermissionError", "ProcessLookupError", "ConnectionRefusedError", "FileNotFoundError", "OSError"}
        assert (said["doubled"], said["own"], said["given"]) == (2, ["own"], "done")
        for what in ("network", "node", "secret", "outside", "proc"):
            assert said[what] in refused, (what, said)

    asyncio.run(main())
    assert not (folder / "outside").exists()
