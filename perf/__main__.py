"""``python -m perf NAME [--json] [--tiny] [--dir FOLDER]``, and ``python -m perf compare BEFORE AFTER``."""

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

import msgspec

from perf import compare
from perf.report import Report

NAMES = (
    *(
        "blobs",
        "density",
        "flow",
        "frames",
        "hog",
        "http",
        "journal",
        "langgraph",
        "latency",
        "leaves",
        "mcp",
        "native_hogs",
        "overflow",
        "process",
        "runq",
        "sandbox",
        "spawn",
    ),
    *("step_floor", "steps", "switch", "waiting"),
)


def main(arguments: list[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["compare"]:
        sys.exit(compare.main(given[1:]))
    parser = argparse.ArgumentParser(
        prog="python -m perf", description="Run a benchmark, or compare what two have said (compare --help)."
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    parser.add_argument("--tiny", action="store_true", help="a run of seconds, for tests: its figures mean nothing")
    parser.add_argument("--dir", type=Path, help="where stores are put (default: the folder for temporary files)")
    options = parser.parse_args(given)
    if options.dir is not None:
        tempfile.tempdir = str(options.dir.resolve(strict=True))
    report: Report = importlib.import_module(f"perf.{options.name}").run(options.tiny)
    if not options.json:
        for kind, values in (("figure", report.figures), ("baseline", report.baselines), ("machine", report.machine)):
            for key, value in values.items():
                shown = f"{value:15,.2f}" if isinstance(value, float) else f"{value!s:>15}"
                if key != "notes":
                    print(f"{kind:9} {key:30} {shown}")
        for note in report.machine["notes"]:
            print(f"note      {note}")
    print(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    main()
