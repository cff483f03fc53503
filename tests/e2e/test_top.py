"""The node in a terminal, and its profiles from the command line."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from serve_kit import AGENTS, Serving, agentrt

from agentrt.cli.top import view
from agentrt.errors import UnreachableError

PROFILES = '[base.limits]\n"tenant:*" = {"tool_calls/day" = 1000}\n[profiles.lean.limits]\n"tenant:*" = {"fuel" = 9}\n'
SETTINGS = '[node]\nload = ["{agents}"]\n[flow]\nfile = "{flow}"\n[slo.targets.all]\nlatency_ms = 60000\n'


def test_top_and_profiles(tmp_path: Path) -> None:
    (tmp_path / "flow.toml").write_text(PROFILES)
    with Serving(tmp_path, SETTINGS.format(agents=AGENTS, flow=tmp_path / "flow.toml")) as node:
        assert agentrt(node, "run", "greet", "--input", '"Ada"')[0] == 0
        code, out, _ = agentrt(node, "profiles", "apply", "lean", "--json")
        assert (code, json.loads(out)["profile"]) == (0, "lean")
        code, out, _ = agentrt(node, "top", "--count", "2", "--json")
        looks = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and len(looks) == 2 and looks[1]["at"] > looks[0]["at"]
        assert looks[0]["flow"]["applied"] == ["lean"]
        assert {budget["key"] for budget in looks[0]["flow"]["budgets"]} == {"tool_calls/day", "fuel"}
        assert agentrt(node, "profiles", "rollback", "lean")[1] == "lean was taken off\n"
        code, _, err = agentrt(node, "profiles", "apply", "fat")
        assert code == 4 and "no profile 'fat'" in err and "lean" in err
        code, out, _ = agentrt(node, "top", "--count", "2")
        assert code == 0 and "interactive" in out and "preemptions/s" in out and "tool_calls/day" in out
        assert "100.0%" in out  # of the target
        with node.client() as client:
            looking = client.live()
            assert next(looking).data["answers"]
            assert node.stop() == 0
            with pytest.raises(UnreachableError):
                for _ in looking:
                    pass


def test_names_of_others_are_text() -> None:
    tier = {"queued": 0, "picks": 0, "slot_ns": 0, "waits": [0, 3], "ended": {}, "run_ms": [None, None, 2.5]}
    name = "[red]x[/red]"
    now = {
        "at": 0, "answers": True, "accepting": False, "live": 0, "parked": 0, "recovering": 0, "stuck": 0, "tokens": 0,
        "cost_micro_usd": 0, "heartbeat_age_ms": 0, "wait_bounds_ns": [1024], "tiers": [tier] * 4, "workers": [],
        "targets": [{"name": "slow", "runs": 2, "good": 1, "objective": 0.9, "latency_ms": 5}],
        "flow": {
            "known": [], "applied": [name], "breakers": [{"scope": "tool", "name": name, "state": "half_open"}],
            "budgets": [{"scope": "tenant", "name": name, "key": "fuel", "used": 1, "held": 2, "limit": 3}],
        },
    }  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=200).print(view(now, None))
    text = out.getvalue()
    assert text.count(name) == 3 and "half open" in text and "50.0%" in text and "drains" in text
