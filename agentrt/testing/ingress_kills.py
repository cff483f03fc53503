"""Every event becomes exactly one run, whatever is killed: a driver for tests of ingresses with a real bus.

    kills = KilledNode(folder, settings_toml, site_of(PLUGIN))
    kills.drive(20_000, lambda: bus.restart(), acknowledged=lambda: bus.pending(topic) == 0, seed=1)

It serves with ``agentrt serve`` as people do, kills it with SIGKILL every few seconds, restarts the bus once in the
middle, and then counts the runs of the store: an event is a JSON object with its number under ``n``.
"""

import importlib.metadata
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from agentrt.records import RunAccepted
from agentrt.stores.lmdb_reads import LmdbReader

_AGENTRT: Final = [sys.executable, "-c", "from agentrt.cli.main import main; main()"]


def site_of(project: Path, target: Path) -> Path:
    """A folder for PYTHONPATH with a plugin's project installed in it, without fetching anything; an empty one if it is
    installed already."""
    name = tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"]
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        target.mkdir()
        return target
    copy = target.with_name(target.name + "-project")  # building leaves files behind
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(copy)], check=True, capture_output=True, timeout=300)
    return target


class KilledNode:
    """A node on ``folder/store`` that is killed again and again. ``settings``: TOML, with the ingress in it."""

    def __init__(self, folder: Path, settings: str, site: Path) -> None:
        self.folder, self.kills = folder, 0
        (folder / "node.toml").write_text(settings)
        self._env = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
        self._process: subprocess.Popen[bytes] | None = None
        self.store = folder / "store"

    def start(self) -> None:
        """Returns when it serves."""
        with (self.folder / "node.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(*_AGENTRT, "--config", str(self.folder / "node.toml"), "serve", "--json"),
                    *("--store", str(self.store), "--listen", "127.0.0.1:0"),
                ],
                cwd=self.folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line and "url" in json.loads(line), (self.folder / "node.log").read_text()[-5000:]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it; SIGTERM lets it stop by itself."""
        if self._process is None:
            return
        self._process.send_signal(number)
        self._process.wait(120)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None

    def drive(
        self,
        count: int,
        restart_bus: Callable[[], None],
        acknowledged: Callable[[], bool],
        *,
        seed: int,
        life_s: tuple[float, float] = (2.0, 5.0),
        kills_min: int = 3,
        timeout_s: float = 100.0,
    ) -> None:
        """Until the bus has everything acknowledged, and at least so many kills; then every event is one run."""
        chance = random.Random(seed)
        end = time.monotonic() + timeout_s
        restarted = False
        try:
            while not (restarted and self.kills >= kills_min and acknowledged()):
                assert time.monotonic() < end, (self.folder / "node.log").read_text()[-5000:]
                self.start()
                if self.kills >= kills_min // 2 and not restarted:
                    time.sleep(chance.uniform(0.0, life_s[0]))
                    restart_bus()
                    restarted = True
                life = time.monotonic() + chance.uniform(*life_s)
                while time.monotonic() < life:
                    time.sleep(0.1)
                    if restarted and self.kills >= kills_min and acknowledged():
                        break
                self.kill()
                self.kills += 1
        finally:
            self.kill()
        assert sorted(self.runs().elements()) == [*range(count)]

    def runs(self) -> Counter[int]:
        """How many runs there are of each event's number."""
        found: Counter[int] = Counter()
        reader = LmdbReader(self.store)
        try:
            after = ""
            while heads := reader.scan_heads(after, 1_000):
                for head in heads:
                    first = reader.read_records(head.run_id, 0, 1)[0]
                    assert isinstance(first, RunAccepted)
                    found[msgspec.json.decode(first.input)["n"]] += 1
                after = heads[-1].run_id
        finally:
            reader.close()
        return found
