;; Has two memories.
(module
  (memory (export "memory") 1)
  (memory 1)
  (func (export "agentrt_run") (result i32) i32.const 0))
