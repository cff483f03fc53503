# What modules that can be captured are made with. Part of _core.pyx.

def module_facts(bytes wasm not None, bytes loop_export=None) -> tuple:
    """(module, facts): the module, its loops each calling the function exported as ``loop_export`` first if that is given, and
    what it does that some uses cannot cope with: "exceptions", "tail_calls", "tables_change", "segments_drop",
    "references" (in mutable globals), "start" (a start function), each a bool, and "loops", how many. Bulk operations stay.
    Raises ModuleError and its kinds."""
    cdef art_rewrite_config config
    cdef art_rewrite_facts facts
    cdef char msg[MSG]
    cdef uint8_t *out = NULL
    cdef size_t out_len = 0
    cdef const uint8_t *code = <const uint8_t *>PyBytes_AS_STRING(wasm)
    cdef size_t code_len = PyBytes_GET_SIZE(wasm)
    cdef int err
    art_rewrite_config_default(&config)
    config.keep_bulk = True
    config.table_elements_max = 0xffffffff  # the engine that it is compiled for has a limit of its own
    if loop_export is not None:
        config.loop_export = PyBytes_AS_STRING(loop_export)
    msg[0] = 0
    with nogil:
        err = art_rewrite_knowing(code, code_len, &config, &out, &out_len, &facts, msg, MSG)
    check(err, msg)
    try:
        module = PyBytes_FromStringAndSize(<char *>out, out_len)
    finally:
        free(out)
    return module, {
        "exceptions": facts.exceptions, "tail_calls": facts.tail_calls, "tables_change": facts.tables_change,
        "segments_drop": facts.segments_drop, "references": facts.references, "start": facts.start, "loops": facts.loops,
    }


#: Tags of the sections of a guest's frame, by what they hold.
FRAME_SECTIONS = {"globals": 1, "stack": 2, "guest": 3, "output": 4, "wasi": 5}
