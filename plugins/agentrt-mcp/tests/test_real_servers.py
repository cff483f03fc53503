"""Servers of others, as they are on PyPI: time and git of this year's protocol, sqlite of last year's."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mcp_kit import Place, config, opened

pytestmark = pytest.mark.timeout(180)

#: A folder made by ``pip install --target FOLDER -r servers.txt``: an mcp of its own era goes with it.
OLD = os.environ.get("AGENTRT_MCP_OLD_SERVERS", "")


def test_time(place: Place) -> None:
    async def main() -> None:
        settings = place.server(["-m", "mcp_server_time", "--local-timezone", "UTC"], [], trust_hints=True)
        async with opened(config({"time": settings})) as bench:
            assert {spec.name: spec.kind for spec in bench.registry if "-" not in spec.name} == {
                "mcp.tools": "keyed",
                "time.get_current_time": "keyed",  # read-only, idempotent, in a closed world, and never the same twice
                "time.convert_time": "keyed",
            }
            args = {"source_timezone": "Europe/Vienna", "time": "12:00", "target_timezone": "Asia/Tokyo"}
            told = await bench.value("time.convert_time", args)
            assert told["time_difference"] in ("+7.0h", "+8.0h")
            outcome = await bench.call("time.convert_time", args | {"time": "noon"})
            assert outcome.code == "tool_failed"
            assert (await bench.call("time.convert_time", {})).code == "tool_args"

    asyncio.run(main())


def test_git(place: Place, folder: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "safe.directory=*", *arguments], cwd=folder, check=True, capture_output=True)

    git("init", "-b", "main")
    (folder / "file").write_text("hello\n")
    git("add", "file")
    git("-c", "user.name=me", "-c", "user.email=me@acme.example", "commit", "-m", "the first")
    subprocess.run(["chmod", "-R", "a+rwX", folder], check=True)
    trusts = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    trusts["GIT_CONFIG_NOSYSTEM"] = "1"  # it may not read /etc/gitconfig, and would fail for that

    async def main() -> None:
        settings = place.server(
            ["-m", "mcp_server_git", "--repository", str(folder)], [folder], trust_hints=True, environment=trusts
        )
        async with opened(config({"git": settings})) as bench:
            kinds = {spec.name: spec.kind for spec in bench.registry}
            assert kinds["git.git_log"] == kinds["git.git_add"] == "keyed"
            assert kinds["git.git_commit"] == "at_most_once"
            repository = {"repo_path": str(folder)}
            assert "the first" in await bench.value("git.git_log", repository)
            (folder / "file").write_text("hello again\n")
            assert "hello again" in await bench.value("git.git_diff_unstaged", repository)
            outcome = await bench.call("git.git_log", {"repo_path": "/etc"})
            assert outcome.code == "tool_failed"

    asyncio.run(main())


@pytest.mark.skipif(not OLD, reason="AGENTRT_MCP_OLD_SERVERS names no folder with mcp-server-sqlite; .ci/run makes one")
def test_sqlite(place: Place, folder: Path) -> None:
    """It hints nothing, and speaks the protocol of 2025 alone."""

    async def main() -> None:
        start = "from mcp_server_sqlite import main; main()"
        # Two processes use the file, the node's and the tenant's.
        uid = {"uid": 1_950_000_000} if os.geteuid() == 0 else {}
        packages = place.path / "old"
        shutil.copytree(OLD, packages)
        settings = place.server(["-c", start, "--db-path", str(folder / "db")], [folder], packages=packages, **uid)
        async with opened(config({"sqlite": settings})) as bench:
            assert {spec.kind for spec in bench.registry if spec.name.startswith("sqlite.")} == {"at_most_once"}

            async def query(name: str, text: str) -> Any:
                return await bench.value(f"sqlite.{name}", {"query": text})

            await query("create_table", "CREATE TABLE t (n INTEGER)")
            await query("write_query", "INSERT INTO t VALUES (1), (2)")
            assert await query("read_query", "SELECT sum(n) AS s FROM t") == "[{'s': 3}]"
            assert "t" in await bench.value("sqlite.list_tables")

    asyncio.run(main())
