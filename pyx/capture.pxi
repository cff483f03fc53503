# What modules that can be captured are made with. Part of _core.pyx.

def module_facts(bytes wasm not None, bytes loop_export=None, *, list copied=None, uint32_t copies_first=0) -> tuple:
    """(module, facts): the module, its loops each calling the function exported as ``loop_export`` first if that is given, and
    the functions from ``copies_first`` on, which are copies of those ``copied`` (ascending), calling each other; and what it does that some uses cannot cope with: "exceptions", "tail_calls", "tables_change", "segments_drop",
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
    cdef bytes numbers = b"" if copied is None else array("I", copied).tobytes()
    if copied:
        config.copied = <const uint32_t *>PyBytes_AS_STRING(numbers)
        config.copied_count = len(copied)
        config.copies_first = copies_first
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
FRAME_SECTIONS = {"globals": 1, "stack": 2, "guest": 3, "output": 4, "wasi": 5, "boot": 6}

#: Where a guest is to stop that becomes an image: art_boot, by its name in `Core.submit`.
BOOTS = {"rest": 1, "input": 2}
#: Bits of what a boot has seen, in that section.
BOOT_SEEN = {"input": 1, "clock": 2, "seed": 4, "steps": 8}
