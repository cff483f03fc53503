;; Its agentrt_run is of the wrong type.
(module (memory (export "memory") 1) (func (export "agentrt_run") (param i32)))
