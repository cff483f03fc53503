;; Imports agentrt.call with the wrong type.
(module
  (import "agentrt" "call" (func (param i64) (result i32)))
  (memory (export "memory") 1)
  (func (export "agentrt_run") (result i32) i32.const 0))
