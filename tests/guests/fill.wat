;; Fills 64 MiB with one instruction, 16 times.
(module
  (memory (export "memory") 1025)
  (func (export "agentrt_run") (result i32) (local $i i32)
    (loop $again
      (memory.fill (i32.const 65536) (local.get $i) (i32.const 67108864))
      (br_if $again (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 16))))
    ;; 0 if the last byte is what the last fill wrote
    (i32.sub (i32.load8_u (i32.const 67174399)) (i32.const 15))))
