#!/bin/sh
# Builds the guests of the tests: C as the examples are built, WAT with wabt's wat2wasm.
# Usage: tests/guests/build.sh [output folder]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here}
cd "$here"
for source in *.c; do
    ../../examples/guests/build.sh --one "$here/$source" "$out/${source%.c}.wasm"
done
for source in *.wat; do
    # invalid.wat is invalid on purpose
    wat2wasm --debug-names --enable-all --no-check -o "$out/${source%.wat}.wasm" "$source"
done
