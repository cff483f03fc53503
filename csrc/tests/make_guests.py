"""Writes guests.h: the wasm modules that the C tests run, compiled from the text below.

python csrc/tests/make_guests.py          rewrites guests.h beside this file
python csrc/tests/make_guests.py --check  says whether it is up to date
"""

import sys
from pathlib import Path

import wasmtime

IMPORTS = """
 (import "agentrt" "call" (func $call (param i32 i32 i32 i32 i32) (result i32)))
 (import "agentrt" "wait_any" (func $wait_any (param i32 i32) (result i32)))
 (import "agentrt" "submit" (func $submit (param i32 i32 i32) (result i32)))
 (import "agentrt" "read" (func $read (param i32 i32 i32 i32) (result i32)))
 (import "agentrt" "close" (func $close (param i32) (result i32)))
 (import "agentrt" "input" (func $input (param i32 i32 i32) (result i32)))
 (import "agentrt" "restored" (func $restored (param i32 i32 i32) (result i32)))
 (import "agentrt" "output" (func $output (param i32 i32) (result i32)))
 (import "agentrt" "clock_now" (func $clock_now (result i64)))
 (import "agentrt" "random" (func $random (param i32 i32) (result i32)))
"""
MEMORY = '(memory (export "memory") 4)'


def entry(body: str, before: str = "") -> str:
    """A module with all imports and a memory, whose entry has this body."""
    return f'(module {IMPORTS} {MEMORY} {before} (func $entry (export "agentrt_run") (result i32) {body}))'


def bare(body: str, before: str = "") -> str:
    """A module without imports."""
    return f'(module {before} (func (export "agentrt_run") (result i32) {body}))'


# Runs a script given as its input: records of six i32 (what, a, b, c, d, e), each adding an i64 to the output. The
# script is read to 0x10000 and the results go to 0x20000. `what` is an index into COMMANDS; 255 and above returns a.
COMMANDS = (
    "call", "wait_any", "submit", "read", "close", "input", "restored", "output", "clock_now", "random",
    "poke", "peek", "spin", "grow", "unreachable", "load", "divide", "recurse", "fill", "indirect",
)  # fmt: skip
A, B, C, D, E = (f"(i32.load offset={4 * n} (local.get $at))" for n in range(1, 6))
BODIES = {
    "call": f"(call $call {A} {B} {C} {D} {E})",
    "wait_any": f"(call $wait_any {A} {B})",
    "submit": f"(call $submit {A} {B} {C})",
    "read": f"(call $read {A} {B} {C} {D})",
    "close": f"(call $close {A})",
    "input": f"(call $input {A} {B} {C})",
    "restored": f"(call $restored {A} {B} {C})",
    "output": f"(call $output {A} {B})",
    "clock_now": "(call $clock_now)",
    "random": f"(call $random {A} {B})",
    "poke": f"(i32.store {A} {B}) (i32.const 0)",
    "peek": f"(i32.load {A})",
    "spin": f"(call $spin {A})",
    "grow": f"(memory.grow {A})",
    "unreachable": "(call $boom)",
    "load": f"(i32.load {A})",
    "divide": f"(i32.div_s {A} {B})",
    "recurse": f"(call $recurse {A})",
    "fill": f"(memory.fill {A} {B} {C}) (i32.const 0)",
    "indirect": f"(call_indirect (type $entry_type) {A})",
}


def script() -> str:
    blocks = "".join("(block " for _ in COMMANDS)
    labels = " ".join(str(n) for n in range(len(COMMANDS) + 1))
    cases = ""
    for name in COMMANDS:
        body = BODIES[name]
        wide = body if name == "clock_now" else f"(i64.extend_i32_s {body})"
        if ") (i32.const 0)" in body:  # a statement, then 0
            wide = body.replace("(i32.const 0)", "") + "(i64.const 0)"
        cases += f") (local.set $value (block (result i64) {wide})) (br $next)"
    return entry(
        f"""(local $at i32) (local $end i32) (local $to i32) (local $value i64)
        (local.set $at (i32.const 0x10000))
        (local.set $to (i32.const 0x20000))
        (local.set $end (i32.add (local.get $at)
            (call $input (i32.const 0) (i32.const 0x10000) (i32.const 0x10000))))
        (block $done (loop $again
          (br_if $done (i32.ge_u (local.get $at) (local.get $end)))
          (if (i32.ge_u (i32.load (local.get $at)) (i32.const 255)) (then
            (drop (call $output (i32.const 0x20000) (i32.sub (local.get $to) (i32.const 0x20000))))
            (return {A})))
          (block $next
            (block $unknown {blocks}
              (br_table {labels} (i32.load (local.get $at))) {cases})
            unreachable)
          (i64.store (local.get $to) (local.get $value))
          (local.set $to (i32.add (local.get $to) (i32.const 8)))
          (local.set $at (i32.add (local.get $at) (i32.const 24)))
          (br $again)))
        (drop (call $output (i32.const 0x20000) (i32.sub (local.get $to) (i32.const 0x20000))))
        (i32.const 0)""",
        """(type $entry_type (func (result i32)))
        (table 2 funcref)
        (func $boom (result i32) unreachable)
        (func $recurse (param $n i32) (result i32)
          (if (i32.eqz (local.get $n)) (then (return (i32.const 0))))
          (i32.add (i32.const 1) (call $recurse (i32.sub (local.get $n) (i32.const 1)))))
        (func $spin (param $n i32) (result i32) (local $x i32)
          (local.set $x (i32.const 1))
          (block $out (loop $more
            (br_if $out (i32.eqz (local.get $n)))
            (local.set $x (i32.add (i32.mul (local.get $x) (i32.const 1664525)) (i32.const 1013904223)))
            (local.set $n (i32.sub (local.get $n) (i32.const 1)))
            (br $more)))
          (local.get $x))""",
    )


# The same with handlers: a script of two parts. The program runs the first, up to a record whose `what` is UNWIND_PART,
# where it returns; agentrt_unwind runs the second. Both add to one output. It has two commands more: `deep` makes a
# syscall under A calls, each of which would catch any exception, and `caught` says how many did.
UNWIND_PART = 254
UNWIND_COMMANDS = (*COMMANDS, "deep", "caught")


def script_unwind(handlers: str) -> str:
    """``handlers``: the export's type of result and its body, which may call $handlers."""
    blocks = "".join("(block " for _ in UNWIND_COMMANDS)
    labels = " ".join(str(n) for n in range(len(UNWIND_COMMANDS) + 1))
    bodies = BODIES | {"deep": f"(call $deep {A})", "caught": "(global.get $caught)"}
    cases = ""
    for name in UNWIND_COMMANDS:
        body = bodies[name]
        wide = body if name == "clock_now" else f"(i64.extend_i32_s {body})"
        if ") (i32.const 0)" in body:
            wide = body.replace("(i32.const 0)", "") + "(i64.const 0)"
        cases += f") (local.set $value (block (result i64) {wide})) (br $next)"
    return f"""(module {IMPORTS} {MEMORY}
        (global $to (mut i32) (i32.const 0x20000))
        (global $end (mut i32) (i32.const 0))
        (global $caught (mut i32) (i32.const 0))
        (type $entry_type (func (result i32)))
        (table 2 funcref)
        (func $boom (result i32) unreachable)
        (func $recurse (param $n i32) (result i32)
          (if (i32.eqz (local.get $n)) (then (return (i32.const 0))))
          (i32.add (i32.const 1) (call $recurse (i32.sub (local.get $n) (i32.const 1)))))
        (func $deep (param $n i32) (result i32)
          (if (i32.eqz (local.get $n)) (then
            (return (call $call (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 0x8000) (i32.const 8)))))
          (block $thrown
            (return (try_table (result i32) (catch_all $thrown)
              (i32.add (i32.const 1) (call $deep (i32.sub (local.get $n) (i32.const 1)))))))
          (global.set $caught (i32.add (global.get $caught) (i32.const 1)))
          (i32.const -1000))
        (func $spin (param $n i32) (result i32) (local $x i32)
          (local.set $x (i32.const 1))
          (block $out (loop $more
            (br_if $out (i32.eqz (local.get $n)))
            (local.set $x (i32.add (i32.mul (local.get $x) (i32.const 1664525)) (i32.const 1013904223)))
            (local.set $n (i32.sub (local.get $n) (i32.const 1)))
            (br $more)))
          (local.get $x))
        (func $give (drop (call $output (i32.const 0x20000) (i32.sub (global.get $to) (i32.const 0x20000)))))
        (func $interpret (param $at i32) (result i32) (local $value i64)
          (block $done (loop $again
            (br_if $done (i32.ge_u (local.get $at) (global.get $end)))
            (if (i32.ge_u (i32.load (local.get $at)) (i32.const {UNWIND_PART})) (then
              (call $give)
              (return {A})))
            (block $next
              (block $unknown {blocks}
                (br_table {labels} (i32.load (local.get $at))) {cases})
              unreachable)
            (i64.store (global.get $to) (local.get $value))
            (global.set $to (i32.add (global.get $to) (i32.const 8)))
            (local.set $at (i32.add (local.get $at) (i32.const 24)))
            (br $again)))
          (call $give)
          (i32.const 0))
        (func (export "agentrt_run") (result i32)
          (global.set $end (i32.add (i32.const 0x10000)
            (call $input (i32.const 0) (i32.const 0x10000) (i32.const 0x10000))))
          (call $interpret (i32.const 0x10000)))
        (func $handlers (result i32) (local $at i32)
          (local.set $at (i32.const 0x10000))
          (loop $find
            (local.set $at (i32.add (local.get $at) (i32.const 24)))
            (br_if $find (i32.ne (i32.load (i32.sub (local.get $at) (i32.const 24))) (i32.const {UNWIND_PART}))))
          (call $interpret (local.get $at)))
        (func (export "agentrt_unwind") {handlers}))"""


# WASI preview 1: parameters as a string of i (i32) and l (i64); all return an i32, but proc_exit.
WASI = {
    "args_get": "ii", "args_sizes_get": "ii", "environ_get": "ii", "environ_sizes_get": "ii", "clock_res_get": "ii",
    "clock_time_get": "ili", "fd_advise": "illi", "fd_allocate": "ill", "fd_close": "i", "fd_datasync": "i",
    "fd_fdstat_get": "ii", "fd_fdstat_set_flags": "ii", "fd_fdstat_set_rights": "ill", "fd_filestat_get": "ii",
    "fd_filestat_set_size": "il", "fd_filestat_set_times": "illi", "fd_pread": "iiili", "fd_prestat_get": "ii",
    "fd_prestat_dir_name": "iii", "fd_pwrite": "iiili", "fd_read": "iiii", "fd_readdir": "iiili", "fd_renumber": "ii",
    "fd_seek": "ilii", "fd_sync": "i", "fd_tell": "ii", "fd_write": "iiii", "path_create_directory": "iii",
    "path_filestat_get": "iiiii", "path_filestat_set_times": "iiiilli", "path_link": "iiiiiii",
    "path_open": "iiiiillii", "path_readlink": "iiiiii", "path_remove_directory": "iii", "path_rename": "iiiiii",
    "path_symlink": "iiiii", "path_unlink_file": "iii", "poll_oneoff": "iiii", "proc_exit": "i", "proc_raise": "i",
    "sched_yield": "", "random_get": "ii", "sock_accept": "iii", "sock_recv": "iiiiii", "sock_send": "iiiii",
    "sock_shutdown": "ii",
}  # fmt: skip
WASI_COMMANDS = (*WASI, "poke", "peek", "clock_now", "restored")


def wasi_imports(*names: str) -> str:
    types = {"i": "i32", "l": "i64"}
    out = ""
    for name in names or WASI:
        params = " ".join(types[p] for p in WASI[name])
        result = "" if name == "proc_exit" else "(result i32)"
        out += f'(import "wasi_snapshot_preview1" "{name}" (func ${name} (param {params}) {result}))'
    return out


# The same for WASI: records of ten i64 (what, then the arguments), read to 0x20000; results go to 0x30000. `poke` and
# `peek` store and load an i64; `what` of 255 ends the script, and what follows is data.
def wasi_script() -> str:
    blocks = "".join("(block " for _ in WASI_COMMANDS)
    labels = " ".join(str(n) for n in range(len(WASI_COMMANDS) + 1))
    wide = [f"(i64.load offset={8 * n} (local.get $at))" for n in range(1, 10)]
    cases = ""
    for name in WASI_COMMANDS:
        if name == "poke":
            body = f"(i64.store (i32.wrap_i64 {wide[0]}) {wide[1]}) (i64.const 0)"
        elif name == "peek":
            body = f"(i64.load (i32.wrap_i64 {wide[0]}))"
        elif name == "clock_now":
            body = "(call $clock_now)"
        elif name == "restored":
            body = "(i64.extend_i32_s (call $restored (i32.const 0) (i32.const 0) (i32.const 0)))"
        else:
            args = " ".join(
                wide[n] if kind == "l" else f"(i32.wrap_i64 {wide[n]})" for n, kind in enumerate(WASI[name])
            )
            body = f"(call ${name} {args})"
            body = f"{body} (i64.const 0)" if name == "proc_exit" else f"(i64.extend_i32_u {body})"
        cases += f") (local.set $value (block (result i64) {body})) (br $next)"
    return f"""(module {IMPORTS} {wasi_imports()} {MEMORY} (func (export "agentrt_run") (result i32)
        (local $at i32) (local $to i32) (local $value i64)
        (local.set $at (i32.const 0x20000))
        (local.set $to (i32.const 0x30000))
        (drop (call $input (i32.const 0) (i32.const 0x20000) (i32.const 0x10000)))
        (block $done (loop $again
          (br_if $done (i64.ge_u (i64.load (local.get $at)) (i64.const 255)))
          (block $next
            (block $unknown {blocks}
              (br_table {labels} (i32.wrap_i64 (i64.load (local.get $at)))) {cases})
            unreachable)
          (i64.store (local.get $to) (local.get $value))
          (local.set $to (i32.add (local.get $to) (i32.const 8)))
          (local.set $at (i32.add (local.get $at) (i32.const 80)))
          (br $again)))
        (drop (call $output (i32.const 0x30000) (i32.sub (local.get $to) (i32.const 0x30000))))
        (i32.const 0)))"""


# Writes its arguments, a line each, to stdout, and returns how many there are.
WASI_MAIN = f"""(module {wasi_imports("fd_write")} {MEMORY}
    (global $initialized (mut i32) (i32.const 0))
    (global $heap (mut i32) (i32.const 1024))
    (func (export "_initialize") (global.set $initialized (i32.const 1)))
    (func (export "malloc") (param $n i32) (result i32)
      (if (i32.gt_u (local.get $n) (i32.const 65536)) (then (return (i32.const 0xffff0000))))
      (if (i32.gt_u (local.get $n) (i32.const 32768)) (then (return (i32.const 0))))
      (global.get $heap) (global.set $heap (i32.add (global.get $heap) (local.get $n))))
    (func (export "run_main") (param $argc i32) (param $argv i32) (result i32)
      (local $i i32) (local $text i32) (local $end i32)
      (if (i32.eqz (global.get $initialized)) (then (return (i32.const -1))))
      (i32.store8 (i32.const 100) (i32.const 10))
      (block $done (loop $more
        (br_if $done (i32.eq (local.get $i) (local.get $argc)))
        (local.set $text (i32.load (i32.add (local.get $argv) (i32.shl (local.get $i) (i32.const 2)))))
        (local.set $end (local.get $text))
        (block $found (loop $scan
          (br_if $found (i32.eqz (i32.load8_u (local.get $end))))
          (local.set $end (i32.add (local.get $end) (i32.const 1)))
          (br $scan)))
        (i32.store (i32.const 0) (local.get $text))
        (i32.store (i32.const 4) (i32.sub (local.get $end) (local.get $text)))
        (i32.store (i32.const 8) (i32.const 100))
        (i32.store (i32.const 12) (i32.const 1))
        (drop (call $fd_write (i32.const 1) (i32.const 0) (i32.const 2) (i32.const 16)))
        (local.set $i (i32.add (local.get $i) (i32.const 1)))
        (br $more)))
      (local.set $text (i32.load (i32.add (local.get $argv) (i32.shl (local.get $argc) (i32.const 2)))))
      (if (local.get $text) (then (return (i32.const -2))))
      (local.get $argc)))"""


def wasi_command(body: str, before: str = "", name: str = "_start") -> str:
    return f"""(module {wasi_imports("proc_exit", "fd_write", "sched_yield")}
        {IMPORTS.replace("(func $", "(func $agentrt_") if "$agentrt_" in body else ""} {MEMORY} {before}
        (func (export "{name}") {body}))"""


# input: u32 rounds, u32 spin. Each round submits up to four syscalls, spins, takes all answers by wait_any in whatever
# order they come, reads and closes them. Returns 0; any surprise returns a code. Output: hash of what it saw.
TALKER = entry(
    """(local $rounds i32) (local $i i32) (local $n i32) (local $k i32) (local $spin i32) (local $hash i32)
    (if (i32.ne (call $input (i32.const 0) (i32.const 0) (i32.const 8)) (i32.const 8)) (then (return (i32.const 10))))
    (local.set $rounds (i32.load (i32.const 0)))
    (block $done (loop $round
      (br_if $done (i32.eqz (local.get $rounds)))
      (local.set $n (i32.add (i32.and (local.get $rounds) (i32.const 3)) (i32.const 1)))
      (local.set $i (i32.const 0))
      (loop $send
        (i32.store (i32.add (i32.const 64) (i32.shl (local.get $i) (i32.const 2)))
          (call $submit (i32.const 1) (i32.const 0) (i32.const 8)))
        (br_if $send (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1))) (local.get $n))))
      (local.set $spin (i32.load (i32.const 4)))
      (block $spun (loop $more (br_if $spun (i32.eqz (local.get $spin)))
        (local.set $spin (i32.sub (local.get $spin) (i32.const 1))) (br $more)))
      (loop $take
        (local.set $k (call $wait_any (i32.const 64) (local.get $n)))
        (if (i32.or (i32.lt_s (local.get $k) (i32.const 0)) (i32.ge_s (local.get $k) (local.get $n)))
          (then (return (i32.const 11))))
        (local.set $i (i32.load (i32.add (i32.const 64) (i32.shl (local.get $k) (i32.const 2)))))
        (if (i32.ne (call $read (local.get $i) (i32.const 0) (i32.const 128) (i32.const 4)) (i32.const 4))
          (then (return (i32.const 12))))
        (if (i32.ne (i32.load (i32.const 128)) (local.get $i)) (then (return (i32.const 13))))
        (if (call $close (local.get $i)) (then (return (i32.const 14))))
        (local.set $hash (i32.add (i32.mul (local.get $hash) (i32.const 31)) (local.get $i)))
        (local.set $n (i32.sub (local.get $n) (i32.const 1)))
        (i32.store (i32.add (i32.const 64) (i32.shl (local.get $k) (i32.const 2)))
          (i32.load (i32.add (i32.const 64) (i32.shl (local.get $n) (i32.const 2)))))
        (br_if $take (local.get $n)))
      (local.set $rounds (i32.sub (local.get $rounds) (i32.const 1)))
      (br $round)))
    (i32.store (i32.const 0) (local.get $hash))
    (call $output (i32.const 0) (i32.const 4))"""
)

# A deterministic computation with recursion, indirect calls, bulk memory, floats and memory.grow; input: u32 rounds.
COMPUTE = entry(
    """(local $rounds i32) (local $x i64) (local $f f64) (local $at i32)
    (drop (call $input (i32.const 0) (i32.const 0) (i32.const 4)))
    (local.set $rounds (i32.load (i32.const 0)))
    (local.set $x (i64.const 88172645463325252))
    (local.set $f (f64.const 1.5))
    (block $done (loop $more
      (br_if $done (i32.eqz (local.get $rounds)))
      (local.set $x (i64.xor (local.get $x) (i64.shl (local.get $x) (i64.const 13))))
      (local.set $x (i64.xor (local.get $x) (i64.shr_u (local.get $x) (i64.const 7))))
      (local.set $x (i64.xor (local.get $x) (i64.shl (local.get $x) (i64.const 17))))
      (local.set $f (f64.sqrt (f64.add (f64.mul (local.get $f) (local.get $f)) (f64.convert_i64_u (local.get $x)))))
      (local.set $at (i32.and (i32.wrap_i64 (local.get $x)) (i32.const 0xfff8)))
      (i64.store offset=0x10000 (local.get $at) (i64.add (local.get $x) (i64.reinterpret_f64 (local.get $f))))
      (if (i32.eqz (i32.and (local.get $rounds) (i32.const 63))) (then
        (memory.copy (i32.const 0x20000) (i32.const 0x10000) (i32.const 0x4000))
        (memory.fill (i32.add (i32.const 0x24000) (i32.and (local.get $at) (i32.const 0xff)))
          (i32.wrap_i64 (local.get $x)) (i32.const 0x1000))
        (drop (memory.grow (i32.const 0)))))
      (local.set $x (i64.add (local.get $x) (i64.extend_i32_u (call_indirect (type $unary)
        (i32.and (i32.wrap_i64 (local.get $x)) (i32.const 7))
        (i32.and (i32.wrap_i64 (i64.shr_u (local.get $x) (i64.const 20))) (i32.const 1))))))
      (local.set $rounds (i32.sub (local.get $rounds) (i32.const 1)))
      (br $more)))
    (local.set $at (i32.const 0x10000))
    (loop $sum
      (local.set $x (i64.add (i64.mul (local.get $x) (i64.const 31)) (i64.load (local.get $at))))
      (br_if $sum (i32.lt_u (local.tee $at (i32.add (local.get $at) (i32.const 8))) (i32.const 0x28000))))
    (i64.store (i32.const 0) (local.get $x))
    (call $output (i32.const 0) (i32.const 8))""",
    """(type $unary (func (param i32) (result i32)))
    (table funcref (elem $fib $double))
    (func $fib (param $n i32) (result i32)
      (if (i32.lt_u (local.get $n) (i32.const 2)) (then (return (local.get $n))))
      (i32.add (call $fib (i32.sub (local.get $n) (i32.const 1))) (call $fib (i32.sub (local.get $n) (i32.const 2)))))
    (func $double (param $n i32) (result i32) (i32.shl (local.get $n) (i32.const 1)))""",
)

LOOP = "(loop $forever (br $forever))"
GUESTS = {
    "script": script(),
    "unwinder": script_unwind("(result i32) (call $handlers)"),
    "unwinder_void": script_unwind("(drop (call $handlers))"),
    # suspended in its start function it cannot be unwound
    "unwind_start": entry(
        "(i32.const 0)",
        """(func $go (drop (call $call (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0))))
        (start $go) (func (export "agentrt_unwind") unreachable)""",
    ),
    # in _initialize it can
    "unwind_initialize": entry(
        "unreachable",
        """(func (export "_initialize")
          (drop (call $call (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0))))
        (func (export "agentrt_unwind") (result i32)
          (drop (call $call (i32.const 1) (i32.const 0) (i32.const 8) (i32.const 0) (i32.const 0))) (i32.const 7))""",
    ),
    # computes for ever without waiting; its handlers trap
    "unwind_hog": bare(f"{LOOP} (i32.const 0)", '(func (export "agentrt_unwind") unreachable)'),
    # exits in its handlers
    "unwind_exits": wasi_command(
        "(drop (call $agentrt_call (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)))",
        """(func (export "agentrt_unwind") (call $proc_exit (i32.const 5)) unreachable)""",
    ),
    "talker": TALKER,
    "compute": COMPUTE,
    "hello": entry("""(call $output (i32.const 0) (call $input (i32.const 0) (i32.const 0) (i32.const 65536)))"""),
    "minimal": bare("(i32.const 0)"),
    "hog": bare(f"{LOOP} (i32.const 0)"),
    # holds a handle, then computes for ever
    "asker": entry(f"(drop (call $submit (i32.const 1) (i32.const 0) (i32.const 0))) {LOOP} (i32.const 0)"),
    "logger": entry(
        "(loop $more (drop (call $submit (i32.const 13) (i32.const 0) (i32.const 1000))) (br $more)) (i32.const 0)"
    ),
    # log lines, then the end: the last event may meet an earlier one
    "last_words": entry(
        """(local $n i32) (local.set $n (i32.const 40))
        (loop $more (drop (call $submit (i32.const 13) (i32.const 0) (i32.const 8)))
          (br_if $more (local.tee $n (i32.sub (local.get $n) (i32.const 1))))) (i32.const 0)"""
    ),
    # nothing but host functions
    "randomer": entry("(loop $more (drop (call $random (i32.const 0) (i32.const 65536))) (br $more)) (i32.const 0)"),
    "clockwatcher": entry("(loop $more (drop (call $clock_now)) (br $more)) (i32.const 0)"),
    # all statuses without a memory, as a sum of powers of 100
    "no_memory": f"""(module {IMPORTS} (func (export "agentrt_run") (result i32)
        (i32.add (i32.mul (call $submit (i32.const 1) (i32.const 0) (i32.const 0)) (i32.const -1))
        (i32.add (i32.mul (call $call (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0))
            (i32.const -100))
        (i32.add (i32.mul (call $output (i32.const 0) (i32.const 0)) (i32.const -10000))
            (i32.mul (call $random (i32.const 0) (i32.const 0)) (i32.const -1000000)))))))""",
    # "memory" is a function
    "odd_memory": f"""(module {IMPORTS} (func (export "memory")) (func (export "agentrt_run") (result i32)
        (call $output (i32.const 0) (i32.const 0))))""",
    "start_loops": f"""(module (func $start {LOOP}) (start $start)
        (func (export "agentrt_run") (result i32) (i32.const 0)))""",
    "start_counts": f"""(module {IMPORTS} {MEMORY} (global $n (mut i32) (i32.const 1000000))
        (func $start (loop $more (global.set $n (i32.sub (global.get $n) (i32.const 1))) (br_if $more (global.get $n))))
        (start $start) (func (export "agentrt_run") (result i32) (global.get $n)))""",
    "start_traps": """(module (func $start_trap unreachable) (start $start_trap)
        (func (export "agentrt_run") (result i32) (i32.const 0)))""",
    "start_calls": f"""(module {IMPORTS} {MEMORY} (global $n (mut i32) (i32.const 0))
        (func $start (global.set $n (call $call (i32.const 1) (i32.const 0) (i32.const 3) (i32.const 8) (i32.const 8))))
        (start $start) (func (export "agentrt_run") (result i32)
          (if (i32.ne (global.get $n) (i32.const 5)) (then (return (i32.const 1))))
          (call $output (i32.const 8) (i32.const 5))))""",
    "data_outside": """(module (memory (export "memory") 1) (data (i32.const 65535) "ab")
        (func (export "agentrt_run") (result i32) (i32.const 0)))""",
    "throws": """(module (tag $t) (func (export "agentrt_run") (result i32) (throw $t)))""",
    # grows to 16 pages and fills all with 0xAB
    "dirty": bare(
        """(drop (memory.grow (i32.const 15)))
        (memory.fill (i32.const 0) (i32.const 0xab) (i32.mul (memory.size) (i32.const 65536))) (i32.const 0)""",
        '(memory (export "memory") 1)',
    ),
    # grows to 16 pages and returns how many bytes are not zero
    "scan": bare(
        """(local $at i32) (local $n i32)
        (drop (memory.grow (i32.const 15)))
        (loop $more
          (local.set $n (i32.add (local.get $n) (i32.ne (i32.load8_u (local.get $at)) (i32.const 0))))
          (br_if $more (i32.lt_u (local.tee $at (i32.add (local.get $at) (i32.const 1))) (i32.const 0x100000))))
        (local.get $n)""",
        '(memory (export "memory") 1)',
    ),
    "wasi_script": wasi_script(),
    "wasi_main": WASI_MAIN,
    "wasi_returns": wasi_command("nop"),
    # traps if it ever goes on
    "wasi_exits": wasi_command("(call $proc_exit (i32.const 3)) unreachable"),
    "wasi_exits_well": wasi_command("(call $proc_exit (i32.const 0)) unreachable"),
    "wasi_exits_at_start": wasi_command(
        "unreachable", "(func $go (call $proc_exit (i32.const 0)) unreachable) (start $go)"
    ),
    # writes 100 bytes a thousand times, with a number in each
    "wasi_floods": wasi_command(
        """(local $n i32)
        (i32.store (i32.const 0) (i32.const 100))
        (i32.store (i32.const 4) (i32.const 100))
        (loop $more
          (i32.store (i32.const 100) (local.get $n))
          (i32.store (i32.const 104) (call $fd_write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))
          (if (i32.ne (i32.load (i32.const 8)) (i32.const 100)) (then unreachable))
          (br_if $more (i32.lt_u (local.tee $n (i32.add (local.get $n) (i32.const 1))) (i32.const 1000))))"""
    ),
    # no memory to write to
    "wasi_no_memory": f"""(module {wasi_imports("fd_write")} (func (export "agentrt_run") (result i32)
        (call $fd_write (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 0))))""",
    # agentrt_run after _initialize
    "wasi_reactor": """(module (global $x (mut i32) (i32.const 5))
        (func (export "_initialize") (global.set $x (i32.const 0)))
        (func (export "agentrt_run") (result i32) (global.get $x)))""",
    # refused at load
    "start_type": """(module (func (export "_start") (result i32) (i32.const 0)))""",
    "initialize_type": """(module (func (export "_initialize") (param i32))
        (func (export "agentrt_run") (result i32) (i32.const 0)))""",
    "main_type": """(module (func (export "malloc") (param i32) (result i32) (i32.const 0))
        (func (export "run_main") (param i32) (result i32) (i32.const 0)))""",
    "malloc_type": """(module (func (export "malloc") (param i64) (result i32) (i32.const 0))
        (func (export "run_main") (param i32 i32) (result i32) (i32.const 0)))""",
    "import_unknown": """(module (import "agentrt" "frobnicate" (func)) (func (export "agentrt_run") (result i32)
        (i32.const 0)))""",
    "import_wasi": """(module (import "wasi_snapshot_preview1" "sched_yields" (func (result i32)))
        (func (export "agentrt_run") (result i32) (i32.const 0)))""",
    "import_type": """(module (import "agentrt" "close" (func (param i64) (result i32)))
        (func (export "agentrt_run") (result i32) (i32.const 0)))""",
    "import_kind": """(module (import "agentrt" "close" (global i32))
        (func (export "agentrt_run") (result i32) (i32.const 0)))""",
    "import_memory": """(module (import "env" "memory" (memory 1))
        (func (export "agentrt_run") (result i32) (i32.const 0)))""",
    "entry_none": '(module (memory (export "memory") 1))',
    "entry_parameter": """(module (func (export "agentrt_run") (param i32) (result i32) (i32.const 0)))""",
    "entry_i64": """(module (func (export "agentrt_run") (result i64) (i64.const 0)))""",
    "entry_two": """(module (func (export "agentrt_run") (result i32 i32) (i32.const 0) (i32.const 0)))""",
    "unwind_parameter": bare("(i32.const 0)", '(func (export "agentrt_unwind") (param i32))'),
    "unwind_i64": bare("(i32.const 0)", '(func (export "agentrt_unwind") (result i64) (i64.const 0))'),
    "unwind_global": bare("(i32.const 0)", '(global (export "agentrt_unwind") i32 (i32.const 0))'),
    "entry_memory": """(module (memory (export "agentrt_run") 1))""",
    "memory_large": bare("(i32.const 0)", '(memory (export "memory") 2000)'),
    "memory_large_hidden": bare("(i32.const 0)", "(memory 2000)"),
    "memory_second": bare("(i32.const 0)", '(memory (export "memory") 1) (memory (export "other") 1)'),
    "memory_shared": bare("(i32.const 0)", '(memory (export "memory") 1 2 shared)'),
    "memory_64": bare("(i32.const 0)", '(memory (export "memory") i64 1)'),
    "table_large": bare("(i32.const 0)", "(table 20001 funcref)"),
}


def header() -> str:
    lines = [
        "/* guests.h: wasm modules for tests. Generated by make_guests.py, which has their text; do not edit. */",
        "#ifndef ART_TESTS_GUESTS_H",
        "#define ART_TESTS_GUESTS_H",
        "",
        "#include <stddef.h>",
        "#include <stdint.h>",
        "",
        "typedef struct guest_wasm {",
        "    const char *name;",
        "    const uint8_t *bytes;",
        "    size_t len;",
        "} guest_wasm;",
        "",
        "/* Commands of the guest `script`. */",
        "enum script_command {",
        *(f"    SCRIPT_{name.upper()} = {n}," for n, name in enumerate(COMMANDS)),
        "    SCRIPT_RETURN = 255,",
        "};",
        "",
        "/* More of them, and the beginning of the second part, of the guests `unwinder`. */",
        "enum unwind_command {",
        *(f"    SCRIPT_{name.upper()} = {n}," for n, name in enumerate(UNWIND_COMMANDS) if name not in COMMANDS),
        f"    SCRIPT_UNWIND = {UNWIND_PART},",
        "};",
        "",
        "/* Commands of the guest `wasi_script`. */",
        "enum wasi_command {",
        *(f"    WASI_{name.upper()} = {n}," for n, name in enumerate(WASI_COMMANDS)),
        f"    WASI_FUNCTIONS = {len(WASI)},",
        "    WASI_END = 255,",
        "};",
        "",
        "enum guest_name {",
        *(f"    GUEST_{name.upper()}," for name in GUESTS),
        "    GUEST_COUNT",
        "};",
        "",
    ]
    for name, text in GUESTS.items():
        code = bytes(wasmtime.wat2wasm(text))
        lines.append(f"static const uint8_t guest_bytes_{name}[] = {{")
        lines += ["    " + " ".join(f"{b:#04x}," for b in code[i : i + 18]) for i in range(0, len(code), 18)]
        lines.append("};")
    lines += [
        "",
        "static const guest_wasm guests[GUEST_COUNT] = {",
        *(f'    {{"{name}", guest_bytes_{name}, sizeof guest_bytes_{name}}},' for name in GUESTS),
        "};",
        "",
        "#endif",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    path = Path(__file__).with_name("guests.h")
    if "--check" in sys.argv[1:]:
        return 0 if path.read_text() == header() else 1
    path.write_text(header())
    return 0


if __name__ == "__main__":
    sys.exit(main())
