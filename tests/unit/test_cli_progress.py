"""What commands tell while they work: on a terminal, elsewhere, and nothing where JSON is asked for."""

import asyncio
import io
import threading
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from agentrt.cli import exits
from agentrt.cli import progress as module
from agentrt.cli.main import run as command_line
from agentrt.cli.progress import progress_shown, stages_shown
from agentrt.stores.lmdb import LmdbStore
from agentrt.testing.stores import Script, Session
from tests.unit.store_kit import schema_4

GUESTS = Path(__file__).parents[2] / "examples" / "guests"


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def shown_by(terminal: Terminal, arguments: Sequence[str], expected: exits.ExitCode = exits.OK) -> str:
    """What a command writes to the terminal."""
    with redirect_stderr(terminal):
        assert command_line(arguments) == expected, arguments
    return told(terminal)


def told(terminal: Terminal) -> str:
    """What was written since it was asked last."""
    text = terminal.getvalue()
    terminal.seek(0)
    terminal.truncate()
    return text


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    session = Session(lambda loop: LmdbStore(folder, loop, map_bytes=2**20, free_bytes_min=0, force_place=True))
    for number in range(3):
        script = Script(f"run_01J0000000000000000000000{number}")
        session.must(script.accept(), script.step(), script.step())
    session.close()
    return folder


def test_work_on_a_store_is_shown_on_a_terminal(store: Path, tmp_path: Path, terminal: Terminal) -> None:
    file, runs = str(tmp_path / "runs.export"), [f"run_01J0000000000000000000000{number}" for number in range(3)]
    at = ["--store", str(store)]
    old = tmp_path / "old"
    schema_4(old)
    for arguments, expected in (
        (["store", "verify", *at], "rows of"),
        (["store", "compact", *at], "pages of the copy of"),
        (["store", "migrate", "--store", str(old)], "runs brought up"),
        (["runs", "export", *runs, "-o", file, *at], "runs let go"),
        (["runs", "import", file, *at], "runs taken over"),
    ):
        shown = shown_by(terminal, arguments)
        assert "\x1b[2K" in shown, arguments  # in place: the line is cleared
        assert expected in shown, (arguments, shown)
        if arguments[0] == "runs":
            assert "3/3" in shown


def test_with_json_nothing_is_told(store: Path, tmp_path: Path, terminal: Terminal) -> None:
    file, at = str(tmp_path / "runs.export"), ["--store", str(store), "--json"]
    packed = str(tmp_path / "packed.wasm")
    for arguments in (
        ["store", "verify", *at],
        ["store", "compact", *at],
        ["store", "migrate", *at],
        ["runs", "export", "run_01J00000000000000000000000", "-o", file, *at],
        ["runs", "import", file, *at],
        ["pack", "micropython", "-o", packed, "--file", f"/lib={GUESTS / 'BUILT_WITH'}", "--json"],
    ):
        assert shown_by(terminal, arguments) == "", arguments


def test_packing_is_shown_on_a_terminal(tmp_path: Path, terminal: Terminal) -> None:
    out = str(tmp_path / "packed.wasm")
    shown = shown_by(terminal, ["pack", "micropython", "-o", out, "--file", f"/lib={GUESTS}"])
    assert "writing" in shown and "\x1b[2K" in shown and "files, version" in shown


def test_elsewhere_lines_come_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now_s[0])
    with progress_shown(False) as tell:
        tell("early", 1, 2)
        now_s[0] += 6
        threads = [threading.Thread(target=tell, args=("runs", 1_500, 3_000)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        now_s[0] += 6
        tell("pages", 0, 0)
        now_s[0] += 6
        tell("blobs", 7, 0)
    assert capsys.readouterr().err.splitlines() == ["runs 1,500 of 3,000", "pages", "blobs 7"]


def test_stages_are_a_line_each_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with stages_shown("a.wasm", False) as tell:
        tell("booting")
        tell("proving")
    with stages_shown("a.wasm", True) as tell:
        tell("booting")
    assert capsys.readouterr().err.splitlines() == ["a.wasm: booting", "a.wasm: proving"]


def test_stages_and_markup_on_a_terminal(terminal: Terminal) -> None:
    with redirect_stderr(terminal), stages_shown("[red]a.wasm", False) as tell:
        tell("proving")
    assert "[red]a.wasm: proving" in told(terminal)


def test_what_goes_wrong_leaves_no_bar_behind(terminal: Terminal) -> None:
    async def fail() -> None:
        raise ValueError("no")

    with redirect_stderr(terminal), pytest.raises(ValueError), progress_shown(False) as tell:
        tell("runs", 1, 2)
        asyncio.run(fail())
    shown = told(terminal)
    assert shown.endswith("\x1b[2K") or "\x1b[?25h" in shown  # the cursor is back
