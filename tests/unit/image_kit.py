"""Modules whose images the tests make, as text, and how they are run."""

from pathlib import Path
from typing import Any

import wasmtime

from agentrt.backends import wasi
from agentrt.backends.base import Exit
from agentrt.backends.images import begin_of
from agentrt.capture.boot import Bench
from agentrt.capture.image import Image, make_image
from agentrt.config import load_config
from agentrt.sizing import core_parameters

PARAMETERS = core_parameters(load_config(env={}))

_WASI = '(import "wasi_snapshot_preview1" "{0}" (func ${0} (param {1}) (result i32)))'
IMPORTS = "\n".join(
    (
        _WASI.format("fd_read", "i32 i32 i32 i32"),
        _WASI.format("fd_write", "i32 i32 i32 i32"),
        _WASI.format("random_get", "i32 i32"),
        _WASI.format("clock_time_get", "i32 i64 i32"),
        _WASI.format("path_open", "i32 i32 i32 i32 i32 i64 i64 i32 i32"),
        '(import "agentrt" "input" (func $input (param i32 i32 i32) (result i32)))',
        '(import "agentrt" "output" (func $output (param i32 i32) (result i32)))',
        '(import "agentrt" "submit" (func $submit (param i32 i32 i32) (result i32)))',
        '(import "agentrt" "call" (func $call (param i32 i32 i32 i32 i32) (result i32)))',
    )
)


def wat(text: str) -> bytes:
    return bytes(wasmtime.wat2wasm(text))


def reader(depth: int, boot: str = "", *, memory: str = "2 8", before_read: str = "") -> bytes:
    """A WASI program: computes, goes ``depth`` calls deep, every second of them through a table, with locals of each
    kind that are needed on the way back, and reads stdin at the bottom. On its way back it goes down again for each
    byte, and adds up everything; the sum is what it prints. ``boot``, ``before_read``: code at the beginning, and
    before the reading."""
    return wat(f"""(module {IMPORTS} (memory (export "memory") {memory})
      (type $down (func (param i32 i64 f32 f64) (result i64)))
      (table 4 funcref) (elem (i32.const 1) $down)
      (global $level (mut i32) (i32.const 5)) (global $of (mut i64) (i64.const 1))
      (global $a (mut f32) (f32.const 0.5)) (global $b (mut f64) (f64.const 0.25))
      (global $v (mut v128) (v128.const i64x2 1 2))
      (data (i32.const 1000) "begun")
      (func $read (result i64) (local $sum i64) (local $at i32)
        {before_read}
        (i32.store (i32.const 64) (i32.const 256)) (i32.store (i32.const 68) (i32.const 32))
        (drop (call $fd_read (i32.const 0) (i32.const 64) (i32.const 1) (i32.const 72)))
        (loop $next
          (if (i32.lt_u (local.get $at) (i32.load (i32.const 72))) (then
            (local.set $sum (i64.add (i64.mul (local.get $sum) (i64.const 31))
              (i64.load8_u offset=256 (local.get $at))))
            (local.set $at (i32.add (local.get $at) (i32.const 1)))
            (br $next))))
        (local.get $sum))
      (func $down (type $down) (local $mine i64)
        (local.set $mine (i64.mul (local.get 1) (i64.const 7)))
        (global.set $level (i32.add (global.get $level) (local.get 0)))
        (global.set $of (i64.add (global.get $of) (local.get $mine)))
        (global.set $a (f32.add (global.get $a) (local.get 2)))
        (global.set $b (f64.mul (global.get $b) (local.get 3)))
        (global.set $v (i64x2.add (global.get $v) (i64x2.splat (local.get 1))))
        (if (i32.eqz (local.get 0)) (then (return (i64.add (call $read) (local.get $mine)))))
        (i64.add (local.get $mine) (i64.add
          (i64.trunc_f64_s (f64.add (local.get 3) (f64.promote_f32 (local.get 2))))
          (if (result i64) (i32.and (local.get 0) (i32.const 1))
            (then (call $down (i32.sub (local.get 0) (i32.const 1)) (local.get $mine)
              (f32.add (local.get 2) (f32.const 1.5)) (f64.add (local.get 3) (f64.const 2.25))))
            (else (call_indirect (type $down) (i32.sub (local.get 0) (i32.const 1)) (local.get $mine)
              (f32.mul (local.get 2) (f32.const 0.5)) (f64.sub (local.get 3) (f64.const 0.75)) (i32.const 1)))))))
      (func (export "_start") (local $sum i64) (local $left i32)
        {boot}
        (memory.fill (i32.const 70000) (i32.const 9) (i32.const 20000))
        (drop (memory.grow (i32.const 1)))
        (local.set $sum (call $down (i32.const {depth}) (i64.const 3) (f32.const 1.25) (f64.const 10.5)))
        (local.set $left (i32.load (i32.const 72)))
        (loop $again
          (if (local.get $left) (then
            (local.set $left (i32.sub (local.get $left) (i32.const 1)))
            (local.set $sum (i64.add (local.get $sum)
              (call $down (i32.const 2) (local.get $sum) (f32.const 1) (f64.const 2))))
            (br $again))))
        (i64.store (i32.const 512) (local.get $sum))
        (i64.store (i32.const 520) (global.get $of))
        (i32.store (i32.const 528) (global.get $level))
        (f32.store (i32.const 532) (global.get $a))
        (f64.store (i32.const 536) (global.get $b))
        (v128.store (i32.const 544) (global.get $v))
        (i64.store (i32.const 560) (i64.load (i32.const 80000)))
        (i64.store (i32.const 568) (i64.load (i32.const 1000)))
        (i32.store (i32.const 64) (i32.const 512)) (i32.store (i32.const 68) (i32.const 64))
        (drop (call $fd_write (i32.const 1) (i32.const 64) (i32.const 1) (i32.const 72)))))""")


def agent(init: str = "", *, more: str = "", type: str = "", before: str = "") -> bytes:
    """An agent with a function ``ready`` that makes it so; what it gives is all of its state. ``before`` is done by its
    entry: "(call $ready)" makes it the same without an image."""
    return wat(f"""(module {IMPORTS} (memory (export "memory") 2)
      (table 2 funcref) (elem (i32.const 0) $started)
      (global $i (mut i32) (i32.const -7)) (global $l (mut i64) (i64.const 5)) (global $k i32 (i32.const 3))
      (global $f (mut f32) (f32.const 1.5)) (global $d (mut f64) (f64.const -2))
      (global $v (mut v128) (v128.const i64x2 1 2))
      (data (i32.const 100) "data") {more}
      (func $started (export "_initialize") (i32.store (i32.const 200)
        (i32.add (i32.load (i32.const 200)) (i32.const 1))))
      (func $ready (export "ready") {type}
        (global.set $i (i32.const -100000)) (global.set $l (i64.const 0x7fffffffffffffff))
        (global.set $f (f32.const nan)) (global.set $d (f64.const 1e300))
        (global.set $v (v128.const i64x2 -1 77))
        (i32.store (i32.const 100) (i32.const 0))
        (memory.fill (i32.const 65000) (i32.const 3) (i32.const 1000))
        (i32.store (i32.const 130000) (i32.const 42)) {init})
      (func (export "agentrt_run") (result i32) {before}
        (i32.store (i32.const 0) (global.get $i)) (i64.store (i32.const 8) (global.get $l))
        (f32.store (i32.const 16) (global.get $f)) (f64.store (i32.const 24) (global.get $d))
        (v128.store (i32.const 32) (global.get $v)) (i32.store (i32.const 48) (global.get $k))
        (call $output (i32.const 0) (i32.const 131072))))""")


def image(module: bytes, folder: Path, **how: Any) -> Image:
    return make_image(module, PARAMETERS, cache_folder=folder / "images", cache_bytes_max=1 << 30, **how)


def bench(module: bytes) -> Bench:
    """A core for guests of a module, packed or not, that may be an image. The caller closes it."""
    code, packed = wasi.unpack(module)
    return Bench(code, packed, PARAMETERS, begin_of(code, packed))


def outcome(made: Bench, data: bytes = b"", fuel: int = 10**10) -> Exit:
    """How a guest ends that is left alone, but for times."""
    _, exit = made.run(None, fuel, data)
    assert exit is not None
    return exit._replace(submitted_ns=0, first_ns=0, slot_ns=0)
