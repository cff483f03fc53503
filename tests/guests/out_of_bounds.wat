;; Reads beyond its memory.
(module
  (memory (export "memory") 1)
  (func (export "agentrt_run") (result i32) i32.const 65536 i32.load))
