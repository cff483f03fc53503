;; Traps in its start function.
(module
  (memory (export "memory") 1)
  (func $start unreachable)
  (start $start)
  (func (export "agentrt_run") (result i32) i32.const 0))
