"""The command line: exit codes, what goes to stdout, and reading a store."""

import asyncio
import hashlib
import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from agentrt import doctor, errors
from agentrt import records as r
from agentrt.about import version
from agentrt.backends import wasi
from agentrt.cli import exits
from agentrt.cli.main import COMMANDS, group, run
from agentrt.cli.run import find_tools, read_input
from agentrt.config import Config, load_config
from agentrt.doctor import Check, Report
from agentrt.errors import InputError, StoreInUseError
from agentrt.fold import RunFold, apply, head_of
from agentrt.ids import new_run_id
from agentrt.reference import cli_page
from agentrt.stores.base import Batch
from agentrt.stores.lmdb import LmdbStore


def call(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[exits.ExitCode, str, str]:
    code = run(arguments)
    out, err = capfd.readouterr()
    return code, out, err


# --- errors and exit codes -----------------------------------------------------


def test_every_error_has_an_exit_code_of_its_kind() -> None:
    found = dict(exits.error_codes())
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.AgentrtError) and value is not errors.AgentrtError:
            assert value.code in found, name
    internal = [name for name, code in found.items() if code == exits.INTERNAL]
    assert internal == ["internal"]  # nothing else may look like a bug


def test_exit_codes_are_documented_and_distinct() -> None:
    assert len({code.code for code in exits.CODES}) == len(exits.CODES)
    page = cli_page()
    for code in exits.CODES:
        assert f"| {code.code} | {code.name} | {code.meaning} |" in page
    summary = re.search(r"Exit codes: ([^.]*)\.", " ".join(page.split()))
    assert summary
    assert summary[1] == ", ".join(f"{code.code} {code.name}" for code in exits.CODES)


def test_errors_become_messages_and_codes(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Config) -> Report:
        raise StoreInUseError("the folder is in use", hint="Stop the other")

    monkeypatch.setattr("agentrt.cli.doctor.examine", refuse)
    code, out, err = call(capfd, "doctor")
    assert (code, out) == (exits.STORE, "")
    assert err == "Error: the folder is in use. Stop the other [store_in_use]\n"
    code, out, err = call(capfd, "doctor", "--json")
    assert code == exits.STORE
    assert json.loads(out) == {
        "error": {"code": "store_in_use", "message": "the folder is in use", "hint": "Stop the other"}
    }


def test_a_bug_is_an_internal_error_with_its_traceback(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(config: Config) -> Report:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("agentrt.cli.doctor.examine", crash)
    code, out, err = call(capfd, "doctor", "--json")
    assert code == exits.INTERNAL
    assert json.loads(out)["error"]["code"] == "internal"
    assert "Traceback" in err
    assert "ZeroDivisionError: oops" in err


def test_ctrl_c(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(config: Config) -> Report:
        raise KeyboardInterrupt

    monkeypatch.setattr("agentrt.cli.doctor.examine", interrupt)
    code, out, err = call(capfd, "doctor")
    assert (code, out, err.strip()) == (exits.INTERRUPTED, "", "Interrupted")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], exits.USAGE),
        (["nonsense"], exits.USAGE),
        (["doctor", "--nonsense"], exits.USAGE),
        (["run"], exits.USAGE),
        (["run", "/is/not/there.wasm"], exits.USAGE),
        (["--config", "/is/not/there.toml", "config", "show"], exits.CONFIG),
        (["runs", "ls"], exits.CONFIG),  # which store?
        (["runs", "ls", "--store", "/is/not/there"], exits.INPUT),
        (["runs", "show", "7", "--store", "/is/not/there"], exits.INPUT),
        (["--version"], exits.OK),
        (["--help"], exits.OK),
        (["runs", "show", "--help"], exits.OK),
    ],
)
def test_usage(arguments: Sequence[str], code: exits.ExitCode, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(list(arguments)) == code


def test_every_command_takes_json() -> None:
    def commands(command: click.Command, path: list[str]) -> Iterator[tuple[list[str], click.Command]]:
        if not isinstance(command, click.Group):
            yield path, command
            return
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, [*path, name])

    found = list(commands(group, []))
    assert len(found) > 40
    assert [path for path, command in found if not any("--json" in option.opts for option in command.params)] == []


def test_settings_are_checked_with_json(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capfd, "config", "check", "--json")
    assert (code, err) == (exits.OK, "") and json.loads(out)["workers"] >= 1
    code, out, _ = call(capfd, "--config", "/is/not/there.toml", "config", "check", "--json")
    assert code == exits.CONFIG and json.loads(out)["error"]["code"] == "config"


def test_the_installed_command_exits_with_the_code() -> None:
    command = [str(Path(sys.executable).with_name("agentrt"))]
    if not Path(command[0]).exists():  # a source tree without an installation
        command = [sys.executable, "-c", "from agentrt.cli.main import main; main()"]
    done = subprocess.run([*command, "runs", "ls", "--store", "/is/not/there"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (exits.INPUT.code, "")
    assert "there is no store" in done.stderr
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    parts = rf"agentrt {re.escape(version())} \(wasmtime 50\.[\d.]+, guest ABI 1, store schema \d+, hooks \d+\)\n"
    assert done.returncode == 0
    assert re.fullmatch(parts, done.stdout), done.stdout


def test_the_version_loads_no_engine() -> None:
    code = (
        "import sys; from agentrt.cli.main import run; run(['--version']); "
        "print([name for name in ('agentrt.runtime', 'uvloop', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_all_commands_are_there(capfd: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capfd, "--help")
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", out, re.MULTILINE)


# --- bench ---------------------------------------------------------------------


def test_bench_measures_on_a_store_of_its_own(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "node.toml").write_text(f'[store]\npath = "{tmp_path / "mine"}"\n')
    options = ["--config", str(tmp_path / "node.toml"), "bench", "--seconds", "0.3"]
    code, out, err = call(capfd, *options, "--store", str(tmp_path / "new"), "--json")
    figures = json.loads(out)
    assert code == exits.OK and "one after the other" in err
    assert figures["hogs"] >= 4 and figures["urgent_p50_ms"] <= figures["urgent_p99_ms"]
    assert all(value > 0 for value in figures.values())
    assert not any((tmp_path / "mine").iterdir()) and (tmp_path / "new" / "journal.mdb").exists()
    code, out, _ = call(capfd, *options, "--store", str(tmp_path / "new"))
    assert (code, out) == (exits.CONFIG, "")
    code, out, _ = call(capfd, *options)
    assert code == exits.OK and "runs a second" in out
    assert not any((tmp_path / "mine").iterdir())


# --- pack ----------------------------------------------------------------------


def test_pack_makes_a_module_that_says_what_was_given(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "lib" / "deep").mkdir(parents=True)
    (tmp_path / "lib" / "a.py").write_text("a")
    (tmp_path / "lib" / "deep" / "b.py").write_text("b")
    (tmp_path / "main.py").write_text("print(1)")
    module, out = tmp_path / "program.wasm", tmp_path / "agent.wasm"
    module.write_bytes(b"\0asm\x01\0\0\0")
    options = ["--script", str(tmp_path / "main.py"), "--arg", "-X", "--env", "MODE=a=b", "--entry", "go"]
    options += ["--file", f"/lib={tmp_path / 'lib'}", "--file", f"/etc/x={tmp_path / 'main.py'}"]
    code, printed, _ = call(capfd, "pack", str(module), "-o", str(out), *options, "--json")
    said = json.loads(printed)
    assert code == exits.OK and said["version"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert said["files"] == ["/etc/x", "/lib/a.py", "/lib/deep/b.py", "/main.py"]
    code_alone, packed = wasi.unpack(out.read_bytes())
    assert code_alone == module.read_bytes() and packed is not None
    assert (packed.args, packed.env, packed.entry) == (["program", "-X", "/main.py"], {"MODE": "a=b"}, "go")
    assert packed.files["/lib/deep/b.py"] == b"b"
    assert [each.name for each in tmp_path.glob(".agent*")] == []
    code, _, err = call(capfd, "pack", str(out), "-o", str(out), "--arg", "again")  # in place, and nothing piles up
    _, again = wasi.unpack(out.read_bytes())
    assert code == exits.OK and again is not None and (again.args, again.files) == (["agent", "again"], {})
    assert "version" in err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["nothing.wasm"], "nothing.wasm cannot be read"),
        (["text.wasm"], "no[t]? a wasm module"),
        (["micropython", "--env", "MODE"], "'MODE' is no NAME=VALUE"),
        (["micropython", "--file", "=x"], "is no NAME=VALUE"),
        (["micropython", "--file", "/x=nowhere"], "nowhere cannot be read"),
        (["micropython", "--file", "/../x=text.wasm"], "cannot be"),
        (["micropython", "--arg", "\udcff"], "cannot be"),
    ],
)
def test_what_pack_refuses_leaves_the_file_there_is(
    options: list[str], text: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.wasm").write_text("text")
    (tmp_path / "agent.wasm").write_text("as before")
    code, _, err = call(capfd, "pack", *options, "-o", "agent.wasm")
    assert code == exits.INPUT and re.search(text, err), err
    assert (tmp_path / "agent.wasm").read_text() == "as before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["agent.wasm", "text.wasm"]
    code, _, err = call(capfd, "pack", "micropython", "-o", "no/folder/x.wasm")
    assert code == exits.INPUT and "cannot be written" in err


# --- demo ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[store]\nkind = 'memory'", "may not survive"),
        ("[store]\npath = '/srv/runs'", "--store DIR"),
        ("[scheduler]\nworkers = 99", "scheduler.workers"),
        ("nonsense", "is not TOML"),
    ],
)
def test_the_demo_refuses_settings_it_cannot_respect(
    text: str, said: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "agentrt.toml").write_text(text)
    code, out, err = call(capfd, "--config", str(tmp_path / "agentrt.toml"), "demo", "--seconds", "1")
    assert (code, out) == (exits.CONFIG, "") and said in err


# --- doctor and config ---------------------------------------------------------


def test_doctor_fails_only_on_what_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for state, code in (("works", exits.OK), ("degraded", exits.OK), ("refused", exits.FAILED)):
        check = Check(name="thing", state=state, found="[1] of two", why="because [x]", hint="do")  # type: ignore[arg-type]
        monkeypatch.setattr("agentrt.cli.doctor.examine", lambda config, check=check: Report((check,)))
        exit_code, out, _ = call(capfd, "doctor")
        assert exit_code == code
        assert "[1] of two" in out  # brackets are text, not markup
        assert "because [x]" in out
        exit_code, out, _ = call(capfd, "doctor", "--json")
        assert exit_code == code
        assert json.loads(out)["state"] == state


def test_doctor_looks_at_the_store_it_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Config] = []
    monkeypatch.setattr("agentrt.cli.doctor.examine", lambda config: seen.append(config) or doctor.Report(()))
    run(["doctor", "--store", str(tmp_path)])
    assert seen[0].store.path == str(tmp_path)


def test_config_show_is_a_file_that_config_reads(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[scheduler]\nworkers = 3\nquantum_ms = [1, 2, 3, 4]\n[store]\npath = "/x \\"y\\""\n')
    code, out, _ = call(capfd, "--config", str(file), "config", "show")
    assert code == exits.OK
    shown = tmp_path / "b.toml"
    shown.write_text(out)
    assert load_config(shown, env={}) == load_config(file, env={})
    code, out, _ = call(capfd, "--config", str(shown), "config", "show", "--json")
    assert json.loads(out)["scheduler"]["quantum_ms"] == [1, 2, 3, 4]
    assert tomllib.loads(shown.read_text())["store"]["path"] == '/x "y"'


def test_config_check(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(capfd, "config", "check")[0] == exits.OK
    monkeypatch.setenv("AGENTRT_WASM__GUESTS_MAX", "900000")
    code, _, err = call(capfd, "config", "check")
    assert code == exits.CONFIG
    assert "vm.max_map_count" in err


# --- run: what is checked before anything starts -------------------------------


def test_input_is_json_or_a_file_of_it(tmp_path: Path) -> None:
    file = tmp_path / "input.json"
    file.write_text('{"a": [1]}')
    assert read_input(f"@{file}") == {"a": [1]}
    assert read_input("3") == 3
    with pytest.raises(InputError, match="not JSON"):
        read_input("text")
    with pytest.raises(InputError, match="cannot be read"):
        read_input("@/is/not/there")


def test_tools_are_found_by_module_file_and_function(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from agentrt.tools.spec import tool\n"
        "@tool(kind='pure')\ndef one(x: int) -> int:\n    return x\n"
        "@tool(kind='pure', name='second')\ndef two() -> None:\n    pass\n"
    )
    assert [spec.name for spec in find_tools(str(file))] == ["one", "second"]
    assert [spec.name for spec in find_tools(f"{file}:two")] == ["second"]
    with pytest.raises(InputError, match="no tool function three"):
        find_tools(f"{file}:three")


# --- runs ----------------------------------------------------------------------


class Written:
    """A store with two runs: one that succeeded after a step, one that waits for its step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done = new_run_id(now_ms=1_000)
        self.open = new_run_id(now_ms=2_000)
        self.loop = asyncio.new_event_loop()
        self.store = LmdbStore(folder, self.loop, force_place=True)
        now = time.time_ns()
        step = r.StepPrepared(2, now, "1:1", "tool.call", "keyed", b'{"tool":"send"}', b"d" * 32, "key-1", 1)
        self.write(
            self.done,
            self.accepted(now, "acme"),
            step,
            r.StepCommitted(3, now, "1:1", "tool.call", b"d" * 32, True, b'"sent"', b"e" * 32, 1),
            r.RunEnded(4, now + 1_500_000_000, "SUCCEEDED", b'{"mail":[1,2]}', None, r.Cost(fuel=1234)),
        )
        self.write(self.open, self.accepted(now, "other"), step)

    def accepted(self, now: int, tenant: str) -> r.RunAccepted:
        return r.RunAccepted(1, now, tenant, "mailer", "v" * 64, b'{"to":"x"}', 1, bytes(16), 10**9, {"abi": "1"})

    def write(self, run_id: str, *records: r.Record) -> None:
        folded = RunFold()
        for record in records:
            apply(folded, record)

        async def commit() -> None:
            future = asyncio.get_running_loop().create_future()
            batch = Batch(head_of(folded, run_id), 0, records)
            self.store.commit(batch, lambda error: future.set_result(error))
            assert await future is None

        self.loop.run_until_complete(commit())

    def close(self) -> None:
        self.store.close()
        self.loop.close()


@pytest.fixture
def written(tmp_path: Path) -> Written:
    made = Written(tmp_path / "store")
    made.close()
    return made


def elsewhere(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    """The command in a process of its own."""
    code = "from agentrt.cli.main import main; main()"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], **(pipes | options))


def test_runs_are_listed_beside_the_node_that_has_them_open(tmp_path: Path) -> None:
    written = Written(tmp_path)
    out, err = elsewhere("runs", "ls", "--store", str(tmp_path), "--json").communicate()
    written.close()
    assert err == ""
    assert [json.loads(line)["run_id"] for line in out.splitlines()] == [written.done, written.open]


def test_runs_are_listed(written: Written, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capfd, "runs", "ls", "--store", str(written.folder), "--json")
    assert code == exits.OK
    first, second = map(json.loads, out.splitlines())
    assert (first["run_id"], first["state"], first["tenant"]) == (written.done, "SUCCEEDED", "acme")
    assert (second["run_id"], second["agent"], second["ended_ns"]) == (written.open, "mailer", None)
    code, out, err = call(capfd, "runs", "ls", "--store", str(written.folder), "--limit", "1")
    assert written.open in out
    assert written.done not in out
    assert "There are older ones; see --limit" in err


def test_runs_are_filtered(written: Written, capfd: pytest.CaptureFixture[str]) -> None:
    place = ("--store", str(written.folder), "--json")
    for option, value, expected in (
        ("--state", "succeeded", [written.done]),
        ("--tenant", "other", [written.open]),
        ("--tenant", "nobody", []),
        ("--agent", "mailer", [written.done, written.open]),
        ("--agent", "mail", []),
        ("--text", written.open[-10:].lower(), [written.open]),
    ):
        _, out, _ = call(capfd, "runs", "ls", option, value, *place)
        assert [json.loads(line)["run_id"] for line in out.splitlines()] == expected


def test_a_run_is_shown_with_its_steps(written: Written, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capfd, "runs", "show", written.done, "--store", str(written.folder), "--json")
    assert code == exits.OK
    shown = json.loads(out)
    assert (shown["input"], shown["result"], shown["cost"]["fuel"]) == ({"to": "x"}, {"mail": [1, 2]}, 1234)
    (step,) = shown["steps"]
    assert (step["path"], step["key"], step["state"], step["result"]) == ("1:1", "key-1", "COMMITTED", "sent")
    code, out, _ = call(capfd, "runs", "show", written.open, "--store", str(written.folder))
    assert code == exits.OK
    assert "PREPARED" in out


def test_a_run_that_is_not_there(written: Written, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capfd, "runs", "show", new_run_id(), "--store", str(written.folder))
    assert code == exits.INPUT
    assert "unknown_run" in err


def test_a_closed_pipe_is_no_error(written: Written) -> None:
    process = elsewhere("runs", "ls", "--json", "--store", str(written.folder))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0
    process.stderr.close()
