"""What the configuration says of tools reaches them: classes, secrets, how hosts start."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import wiring_fixture as fixture

from agentrt import Runtime
from agentrt.config import load_config
from agentrt.errors import BudgetExhaustedError, ConfigError, InputError, RunError, RunTimedOutError
from agentrt.states import RunState

HOG = Path(__file__).parents[2] / "examples" / "guests" / "hog.wasm"
VALUE = "sk_live_0123456789"


def test_a_class_of_the_configuration_has_hosts_of_its_own() -> None:
    tools = [fixture.where, fixture.where_else]
    with pytest.raises(InputError, match=r"no class 'browser'.*\[tools\.classes\.browser\]"):
        Runtime(tools=tools)
    settings = {
        "store.kind": "memory",
        "wasm.guests_max": 50,
        "tools.spares": 0,
        "tools.template": "exec",
        "tools.classes.browser.hosts_max": 1,
        "tools.classes.browser.hosts_per_domain_max": 1,
        "tools.classes.browser.queue_items_max": 2,
    }
    with Runtime(config=load_config(env={}, arguments=settings), tools=tools) as runtime:
        runtime.register_sync(fixture.caller)
        a, b = runtime.submit_sync("caller", ["where", "where_else"]).result_sync(60)
        assert a != b
        assert runtime.statistics_sync().tools.start_mode == "exec"
        with pytest.raises(RunError, match="queue_full|calls"):  # the bound of that class alone
            runtime.submit_sync("caller", ["where_else"] * 5).result_sync(60)
        assert runtime.submit_sync("caller", ["where"] * 5).result_sync(60) == [a] * 5


@pytest.mark.parametrize("source", ["folder", "environment"])
def test_secrets_reach_their_tool_and_nothing_else(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, object] = {"store.path": tmp_path / "store", "wasm.guests_max": 50}
    if source == "folder":
        place = tmp_path / "secrets" / "acme"
        place.mkdir(parents=True, mode=0o700)
        os.chmod(tmp_path / "secrets", 0o700)
        (place / "stripe").write_text(VALUE + "\n")
        os.chmod(place / "stripe", 0o600)
        settings["secrets.folder"] = tmp_path / "secrets"
    else:
        monkeypatch.setenv("ACME_SECRET_acme__stripe", VALUE)
        settings["secrets.environment_prefix"] = "ACME_SECRET_"
    with Runtime(config=load_config(env={}, arguments=settings), tools=[fixture.charge]) as runtime:
        runtime.register_sync(fixture.spender)
        emitted: list[bytes] = []
        runtime.observe(lambda event, data: emitted.append(data.data) if event == "emitted" else None)
        for mode, known in (("length", len(VALUE)), ("echo", "secret://stripe"), ("raise", "secret://stripe")):
            run = runtime.submit_sync("spender", [mode, "secret://stripe"], tenant="acme")
            found = run.result_sync(60)
            assert found == known if mode != "raise" else known in found, mode
        assert runtime.submit_sync("spender", ["environment", "secret://stripe"], tenant="acme").result_sync(60) == []
        refused = runtime.submit_sync("spender", ["length", "secret://stripe"], tenant="other").result_sync(60)
        assert "there is no secret stripe" in refused
        refused = runtime.submit_sync("spender", ["length", "secret://unknown"], tenant="acme").result_sync(60)
        assert "does not declare" in refused
    for file in (tmp_path / "store").rglob("*"):
        assert not file.is_file() or VALUE.encode() not in file.read_bytes(), file
    assert VALUE not in json.dumps([each.decode() for each in emitted])
    printed = capfd.readouterr()
    assert VALUE not in printed.out + printed.err


def test_a_wrong_place_of_secrets_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    for folder in ("open", "none"):
        config = load_config(
            env={}, arguments={"store.kind": "memory", "wasm.guests_max": 50, "secrets.folder": tmp_path / folder}
        )
        with pytest.raises(ConfigError, match=folder):
            Runtime(config=config)
    config = load_config(env={}, arguments={"store.kind": "memory", "secrets.environment_prefix": "AGENTRT_X"})
    with pytest.raises(ConfigError, match="AGENTRT_X"):
        Runtime(config=config)


def test_a_keyed_tool_that_is_too_slow_is_called_again_with_its_key(tmp_path: Path) -> None:
    config = load_config(env={}, arguments={"store.kind": "memory", "wasm.guests_max": 50})
    with Runtime(config=config, tools=[fixture.slow]) as runtime:
        runtime.register_sync(fixture.impatient)
        for good_from, result, attempts in ((2, [2], 2), (9, ["tool_timeout", 3], 3)):
            file = tmp_path / str(good_from)
            given = {"file": str(file), "good_from": good_from}
            assert runtime.submit_sync("impatient", given).result_sync(60) == result
            keys, seen = zip(*(line.split() for line in file.read_text().splitlines()), strict=True)
            assert len({*keys}) == 1 and [int(each) for each in seen] == [*range(1, attempts + 1)]


def test_budgets_of_every_level_end_runs_by_name(tmp_path: Path) -> None:
    with Runtime(
        config=load_config(env={}, arguments={"store.kind": "memory", "wasm.guests_max": 50}), tools=[fixture.put]
    ) as runtime:
        runtime.register_sync(fixture.walker, budget={"tool_calls": 3})
        runtime.register_sync(fixture.stuck)
        runtime.register_sync(fixture.spawns)
        runtime.register_sync("hog", HOG, budget={"wall_s": 0.3})

        def limit_of(agent: str, input: object, kind: type[RunError], **how: Any) -> str | None:
            with pytest.raises(kind) as caught:
                runtime.submit_sync(agent, input, **how).result_sync(60)
            return caught.value.limit

        file = tmp_path / "agents"
        given = {"file": str(file), "steps": 10**6}
        assert limit_of("walker", given, BudgetExhaustedError) == "tool_calls"
        assert file.read_text().splitlines() == ["0", "1", "2", "undone"]  # unwinding has calls of its own
        assert limit_of("walker", given, BudgetExhaustedError, budget={"tool_calls": 0}) == "tool_calls"
        how = {"budget": {"tool_calls": 10**9, "wall_s": 0.5}}
        assert limit_of("walker", given, RunTimedOutError, **how) == "wall_s"
        assert limit_of("walker", given, RunTimedOutError, budget={"tool_calls": 10**9}, timeout_s=0.3) == "deadline"
        assert limit_of("stuck", None, RunTimedOutError) == "wall_s"  # of its decorator; it never awaits
        assert limit_of("hog", {"rounds": 10**15}, RunTimedOutError) == "wall_s"
        # A child that is given a day has what its parent has left, also if it is detached.
        for detached in (False, True):
            asked = {"agent": "stuck", "budget": {"wall_s": 86_400}, "detached": detached}
            run_id = runtime.submit_sync("spawns", asked, budget={"wall_s": 2, "result_bytes": 100}).result_sync(60)
            child = runtime.run(run_id).wait_sync(60)
            assert child.state in (RunState.TIMED_OUT, RunState.CANCELLED)  # a joined parent's end may come first
            if detached:
                assert isinstance(error := child.exception(), RunTimedOutError) and error.limit == "wall_s"
