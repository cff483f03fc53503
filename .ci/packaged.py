"""Checks what is in a wheel and in a source distribution: what runs, and what builds and tests like a clone.

``packaged.py WHEEL SDIST``, in a clone. A file of the clone that is in neither list is meant to be left out.
"""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

#: In the wheel, besides modules and metadata.
DATA = {".so", ".pyi", ".typed", ".wasm", ".html", ".css", ".js"}
#: Of the clone, in neither.
LEFT_OUT = {".gitignore", ".gitattributes"}


def _followed(name: str) -> str:
    """A folder of the clone may be a link to another."""
    return str(Path(name).resolve().relative_to(Path.cwd()))


def main(wheel: str, sdist: str) -> int:
    tracked = set(subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines())
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wrong = sorted(
        name
        for name in inside
        if not name.startswith("agentrt/")
        or not (name.endswith(".so") or _followed(name) in tracked)
        or Path(name).suffix not in {*DATA, ".py", ""}
    )
    modules = {name for name in tracked if name.startswith("agentrt/") and name.endswith(".py")}
    missing = sorted(modules - inside)
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    gone = sorted(tracked - sources - LEFT_OUT)
    for what, names in (("in the wheel, not of it", wrong), ("not in the wheel", missing), ("not in the sdist", gone)):
        for name in names:
            print(f"{what}: {name}")
    return 1 if wrong or missing or gone else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
