"""Kills from outside, at random times: ``python errand_killer.py FOLDER SEED``, a process of its own.

It knows nothing of the node but its process id, which is in FOLDER/pid. Victims are the node, or one of its templates
or hosts. It ends when its stdin does, and says on stdout how often it killed what.
"""

import json
import os
import random
import select
import signal
import sys
from collections import Counter
from pathlib import Path

from errand_processes import kind_of, processes


def main(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    killed: Counter[str] = Counter()
    while not select.select([sys.stdin], [], [], rng.uniform(0.02, 0.4))[0]:
        try:
            node = int((folder / "pid").read_text())
        except (OSError, ValueError):
            continue
        # A node needs most of a second to start, so it is spared more often than its hosts.
        what = rng.choice(("node", "agents", "agents", "tools", "tools", "agents_template", "tools_template"))
        victims = [node] if what == "node" else processes(node, what)
        if victims:
            kill(rng.choice(victims), what, killed)
    print(json.dumps(killed), flush=True)


def kill(pid: int, what: str, killed: Counter[str]) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if kind_of(pid) == what.partition("_")[0]:  # not who got its number
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            killed[what] += 1
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
