;; Loops without end and without a syscall.
(module
  (memory (export "memory") 1)
  (func (export "agentrt_run") (result i32) (loop $again br $again) i32.const 0))
