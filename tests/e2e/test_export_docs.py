"""The commands in docs/export-format.md work."""

import re
import subprocess
import sys
from pathlib import Path

from agentrt.stores.lmdb import LmdbStore
from agentrt.testing.stores import Script, Session

PAGE = Path(__file__).parents[2] / "docs" / "export-format.md"


def test_the_commands_move_a_run(tmp_path: Path) -> None:
    session = Session(lambda loop: LmdbStore(tmp_path / "here", loop, force_place=True))
    script = Script()
    session.must(script.accept("k"), script.step())
    session.close()
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    commands = [line.partition("#")[0].split() for line in block.splitlines()]
    assert len(commands) == 2
    for name, *arguments in commands:
        assert name == "agentrt"
        given = [script.run_id if argument == "RUN" else argument for argument in arguments]
        program = "from agentrt.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program, *given], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [script.run_id]
