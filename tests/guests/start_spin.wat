;; Loops without end in its start function, before its entry is called.
(module
  (memory (export "memory") 1)
  (func $start (loop $again br $again))
  (start $start)
  (func (export "agentrt_run") (result i32) i32.const 0))
