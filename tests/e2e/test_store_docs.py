"""The commands in docs/store.md work, on a store that runs have used."""

import re
import subprocess
import sys
from pathlib import Path

from agentrt.testing.stores import Script, Session

PAGE = Path(__file__).parents[2] / "docs" / "store.md"


def test_the_commands_run(tmp_path: Path) -> None:
    from agentrt.stores.lmdb import LmdbStore

    session = Session(lambda loop: LmdbStore(tmp_path / "runs", loop, force_place=True))
    script = Script()
    session.must(script.accept("k"), script.step(), script.step(50_000), script.end())
    session.close()
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    commands = [line.partition("#")[0].split() for line in block.splitlines()]
    assert len(commands) == 5
    for name, *arguments in commands:
        assert name == "agentrt"
        program = "from agentrt.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
