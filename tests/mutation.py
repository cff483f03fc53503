"""Mutation testing: ``python -m tests.mutation [PART…]`` plants faults in what must be right and runs the tests.

mutmut does it; the parts, and the tests of each, are in `pyproject.toml`. All of it takes a night, so this draws
mutants at random from one seed, as many of each part, and shows those that no test noticed. Which kinds may stay, and
why, is in docs/decisions/0041-mutants.md.

A part is mutated in a copy of the tree of its own, ``build/mutation/PART``. What is there is used again: mutmut makes
only mutants of what has changed.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

from mutmut.stats import status_by_exit_code

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PARTS = tomllib.loads(PROJECT)["tool"]["mutation"]
NOTICED = ("killed", "timeout", "segfault")


class Part:
    """What is mutated in a copy of the tree."""

    def __init__(self, name: str) -> None:
        self.folder = ROOT / "build" / "mutation" / name
        files = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        built = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("agentrt/*.so")]
        for file in [*files, *built]:
            if (ROOT / file).is_file():
                (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, self.folder / file)
        tests = [test for pattern in PARTS[name]["tests"] for test in self._expanded(pattern)]
        own = f"only_mutate = {json.dumps(PARTS[name]['only_mutate'])}\n"
        own += f"pytest_add_cli_args_test_selection = {json.dumps(tests)}\n"
        (self.folder / "pyproject.toml").write_text(PROJECT.replace("[tool.mutmut]\n", f"[tool.mutmut]\n{own}"))

    def _expanded(self, pattern: str) -> list[str]:
        file, _, test = pattern.partition("::")
        found = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(file))
        return [f"{name}::{test}" if test else name for name in found]

    def mutants(self) -> dict[str, str]:
        """Each mutant, and what became of it last."""
        metas = sorted((self.folder / "mutants").glob("agentrt/**/*.py.meta"))
        codes = [item for meta in metas for item in json.loads(meta.read_text())["exit_code_by_key"].items()]
        return {name: status_by_exit_code[code] for name, code in codes}

    def mutmut(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """mutmut's command, in the copy."""
        command = [str(Path(sys.executable).with_name("mutmut")), *arguments]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # not the tree itself
        env["CI"] = "true"  # hypothesis: the same examples for every mutant
        return subprocess.run(command, cwd=self.folder, env=env, check=False, capture_output=True, text=True)

    def run(self, names: list[str], jobs: int) -> None:
        """Run the tests with each of these mutants."""
        done = self.mutmut("run", "--max-children", str(jobs), *names)
        if done.returncode:
            raise SystemExit(f"mutmut: {done.stdout[-4000:]}{done.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: each")
    parser.add_argument("--each", type=int, default=50, help="mutants of each part; 0: all of them")
    parser.add_argument("--seed", type=int, default=1, help="draws them")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"no part {', '.join(unknown)}")
    unseen = 0
    for name in asked.parts or PARTS:
        part = Part(name)
        if not part.mutants():
            part.mutmut("run", "none")  # makes them, sees which test runs what, and says that there is no such one
        known = sorted(part.mutants())
        drawn = random.Random(asked.seed).sample(known, min(asked.each or len(known), len(known)))
        part.run(drawn, asked.jobs)
        became = {mutant: end for mutant, end in part.mutants().items() if mutant in set(drawn)}
        counts = Counter(became.values()).most_common()
        print(f"{name}: {len(drawn)} of {len(known)} mutants: {', '.join(f'{n} {end}' for end, n in counts)}")
        for mutant in sorted(mutant for mutant, end in became.items() if end not in NOTICED):
            unseen += 1
            print(part.mutmut("show", mutant).stdout, flush=True)
    print(f"{unseen} were not noticed")


if __name__ == "__main__":
    main()
