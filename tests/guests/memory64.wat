;; Uses 64-bit addresses.
(module (memory (export "memory") i64 1) (func (export "agentrt_run") (result i32) i32.const 0))
