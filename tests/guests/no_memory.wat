;; Has no memory to be read or written: every pointer is outside. Returns 0 if input and output both say EFAULT (-2).
(module
  (import "agentrt" "input" (func $input (param i32 i32 i32) (result i32)))
  (import "agentrt" "output" (func $output (param i32 i32) (result i32)))
  (func (export "agentrt_run") (result i32)
    (i32.add
      (i32.add (call $input (i32.const 0) (i32.const 0) (i32.const 1)) (call $output (i32.const 0) (i32.const 1)))
      (i32.const 4))))
