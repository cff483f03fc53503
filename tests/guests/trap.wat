;; Traps two calls deep: the message names both functions.
(module
  (memory (export "memory") 1)
  (func $inner unreachable)
  (func (export "agentrt_run") (result i32) call $inner i32.const 0))
