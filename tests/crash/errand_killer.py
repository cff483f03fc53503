"""Kills from outside, at random times: ``python errand_killer.py FOLDER SEED``, a process of its own.

It knows nothing of the node but its process id, which is in FOLDER/pid. Victims are the node, or one of its templates,
hosts or programs. It ends when its stdin does, and says on stdout what it killed, one line each.
"""

import os
import random
import select
import signal
import sys
from pathlib import Path

from errand_processes import kind_of, processes

VICTIMS = ("node", "agents", "agents", "tools", "tools", "agents_template", "tools_template", "programs", "programs")


def main(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    while not select.select([sys.stdin], [], [], rng.uniform(0.02, 0.4))[0]:
        try:
            node = int((folder / "pid").read_text())
        except (OSError, ValueError):
            continue
        # A node needs most of a second to start, so it is spared more often than its hosts.
        what = rng.choice(VICTIMS)
        victims = [node] if what == "node" else processes(node, what)
        if victims:
            kill(rng.choice(victims), what)


def kill(pid: int, what: str) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if kind_of(pid) == what.partition("_")[0]:  # not who got its number
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            print(what, flush=True)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
