;; Does not validate: leaves nothing on the stack.
(module (memory (export "memory") 1) (func (export "agentrt_run") (result i32)))
