;; Makes a syscall in its start function, which suspends there: tool.call with a request that is no JSON.
(module
  (import "agentrt" "call" (func $call (param i32 i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (global $status (mut i32) (i32.const 0))
  (func $start (global.set $status (call $call (i32.const 1) (i32.const 0) (i32.const 4) (i32.const 64) (i32.const 64))))
  (start $start)
  (data (i32.const 0) "nope")
  ;; 0 if the call failed as it should (-1)
  (func (export "agentrt_run") (result i32) (i32.add (global.get $status) (i32.const 1))))
