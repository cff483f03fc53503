#!/bin/sh
# Builds the example guests, bit for bit what is committed beside them when clang and wasm-ld are of the version in
# BUILT_WITH. Usage: examples/guests/build.sh [output folder]; CLANG names another compiler.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here}
clang=${CLANG:-clang}
cd "$here" # file names inside the modules must not depend on where this is called

build() {
    # 16 KiB of stack below the data: an overflow traps instead of overwriting it.
    "$clang" --target=wasm32 -std=c11 -O2 -Wall -Wextra -Werror -ffreestanding -nostdlib \
        -I . -I ../../csrc -Wl,--no-entry -Wl,--strip-debug -Wl,--stack-first -Wl,-z,stack-size=16384 \
        -o "$2" "$1"
    chmod 644 "$2"
}

if [ "${1:-}" = --one ]; then # build.sh --one SOURCE OUTPUT
    build "$2" "$3"
    exit
fi
for source in *.c; do
    build "$source" "$out/${source%.c}.wasm"
done
if [ "$out" = "$here" ]; then
    "$clang" --version | head -n 1 > BUILT_WITH
fi
