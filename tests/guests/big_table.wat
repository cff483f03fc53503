;; Declares a table of 10 million elements.
(module
  (memory (export "memory") 1)
  (table 10000000 funcref)
  (func (export "agentrt_run") (result i32) i32.const 0))
