;; Recurses without end.
(module
  (memory (export "memory") 1)
  (func $deeper (param i64) (result i64) local.get 0 call $deeper i64.const 1 i64.add)
  (func (export "agentrt_run") (result i32) i64.const 0 call $deeper i32.wrap_i64))
