"""``python -m perf NAME [--json] [--tiny]``."""

import argparse
import importlib
from pathlib import Path

import msgspec

from perf.report import Report

NAMES = sorted(
    path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__init__", "__main__", "report")
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m perf", description="Run a benchmark.")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="only the JSON object")
    parser.add_argument("--tiny", action="store_true", help="a run of a second, for tests: its figures mean nothing")
    options = parser.parse_args()
    report: Report = importlib.import_module(f"perf.{options.name}").run(options.tiny)
    if not options.json:
        for kind, values in (("figures", report.figures), ("baselines", report.baselines)):
            for key, value in values.items():
                print(f"{kind[:-1]:9} {key:20} {value:12,.1f}")
    print(msgspec.json.encode(report).decode())


if __name__ == "__main__":
    main()
