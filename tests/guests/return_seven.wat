;; Fails by its entry's value, with an output.
(module
  (import "agentrt" "output" (func $output (param i32 i32) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "\"seven\"")
  (func (export "agentrt_run") (result i32) (drop (call $output (i32.const 0) (i32.const 7))) i32.const 7))
