;; Grows its memory by 1 MiB until that fails, and gives the number of MiB as its output.
(module
  (import "agentrt" "output" (func $output (param i32 i32) (result i32)))
  (memory (export "memory") 1)
  (func (export "agentrt_run") (result i32) (local $count i32) (local $at i32)
    (block $full
      (loop $again
        (br_if $full (i32.eq (memory.grow (i32.const 16)) (i32.const -1)))
        (local.set $count (i32.add (local.get $count) (i32.const 1)))
        (br $again)))
    (local.set $at (i32.const 32))
    (loop $digit
      (local.set $at (i32.sub (local.get $at) (i32.const 1)))
      (i32.store8 (local.get $at) (i32.add (i32.const 48) (i32.rem_u (local.get $count) (i32.const 10))))
      (br_if $digit (local.tee $count (i32.div_u (local.get $count) (i32.const 10)))))
    (call $output (local.get $at) (i32.sub (i32.const 32) (local.get $at)))))
