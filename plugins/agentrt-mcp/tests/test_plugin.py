"""What the plugin says of itself, its settings, and what its README shows."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from agentrt_mcp.settings import McpSettings, ServerSettings
from mcp_kit import plugins

from agentrt.config import Config, load_config
from agentrt.errors import ConfigError

README = Path(__file__).parents[1] / "README.md"
_ROOT = Path(__file__).parents[3]

#: With the agentrt that is installed, not the one that stands beside perf.
_PERF = "import sys; sys.path.append(sys.argv[1]); from perf.__main__ import main; main(['mcp', '--tiny', '--json'])"


def test_the_readmes_settings_are_settings(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "node.toml").write_text(text)
    config = load_config(tmp_path / "node.toml", env={})
    plugins().check(config)
    assert set(config.plugin("mcp", McpSettings).servers) == set(tomllib.loads(text)["plugins"]["mcp"]["servers"])
    assert all(name in plugins().names("tool provider") for name in config.tools.providers)
    known = {field.name for kind in (McpSettings, ServerSettings) for field in msgspec.structs.fields(kind)}
    words = set(re.findall(r"`([a-z]+_(?:max|s|path|hints))`", README.read_text()))
    assert words and words <= known


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"command": ["x"], "url": "http://x"},
        {"command": "x"},
        {"url": "ftp://x"},
        {"url": "http://x", "read": ["/"]},
        {"command": ["x"], "headers": {"a": "b"}},
        {"command": ["x"], "kinds": {"a": "reconcilable"}},
        {"command": ["x"], "timeout_s": 0},
        {"command": ["x"], "unknown": 1},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.mcp"):
        plugins().check(Config(plugins={"mcp": {"servers": {"s": wrong}}}))


@pytest.mark.parametrize("name", ["mcp", "", "A", "a.b", "x" * 33, "1"])
def test_wrong_names_of_servers_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.mcp"):
        plugins().check(Config(plugins={"mcp": {"servers": {name: {"url": "http://x"}}}}))


@pytest.mark.timeout(180)
@pytest.mark.skipif(not (_ROOT / "perf").exists(), reason="the benchmark is in agentrt's repository")
def test_the_benchmark_runs() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", _PERF, str(_ROOT)], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert set(report["figures"]) == {"call_us", "overhead_us", "calls_per_s"}
    assert set(report["baselines"]) == {"client_call_us", "client_calls_per_s"}
