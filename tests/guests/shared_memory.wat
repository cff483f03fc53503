;; Has a shared memory.
(module (memory (export "memory") 1 1 shared) (func (export "agentrt_run") (result i32) i32.const 0))
