;; Imports what is not in WASI.
(module
  (import "wasi_snapshot_preview1" "fd_frobnicate" (func (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  (func (export "agentrt_run") (result i32) i32.const 0))
