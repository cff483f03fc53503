# The whole C surface of agentrt._core; nothing else declares externs. All of it is nogil: the core never calls Python, and
# its locks are taken only without the GIL where they could be waited for.
from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t

cdef extern from "<stdbool.h>" nogil:
    ctypedef bint cbool "bool"

cdef extern from "art_err.h" nogil:
    enum:
        ART_ENOMEM, ART_EINVAL, ART_EFULL, ART_ECLOSED, ART_EBUSY, ART_EENGINE, ART_EMODULE, ART_EIMPORT, ART_EENTRY
        ART_ELIMIT, ART_ESTATE, ART_ESYS, ART_EVERSION, ART_ENOENT
    const char *art_strerror(int err)

cdef extern from "evq.h" nogil:
    ctypedef struct art_event:
        pass
    ctypedef struct art_evq:
        pass
    ctypedef struct art_evq_stats:
        uint64_t rung, delayed, drains, drained, rerung, failed
    int art_evq_fd(const art_evq *q)
    size_t art_evq_drain(art_evq *q, art_event **out, size_t max)
    art_evq_stats art_evq_statistics(const art_evq *q)

cdef extern from "rewrite.h" nogil:
    ctypedef struct art_rewrite_config:
        uint32_t table_elements_max
        const char *loop_export
        const uint32_t *copied
        uint32_t copied_count, copies_first
        cbool keep_bulk
    ctypedef struct art_rewrite_facts:
        cbool exceptions, tail_calls, tables_change, segments_drop, references, start
        uint32_t loops
    void art_rewrite_config_default(art_rewrite_config *cfg)
    int art_rewrite_knowing(const uint8_t *wasm, size_t len, const art_rewrite_config *cfg, uint8_t **out,
                            size_t *out_len, art_rewrite_facts *facts, char *msg, size_t msg_len)

cdef extern from "runq.h" nogil:
    enum:
        ART_TIERS
    ctypedef struct art_runq:
        pass
    ctypedef struct art_runq_config:
        uint32_t max_tenants, items_max, tenant_items_max, slots, aging_threshold, tier0_share_pct
        uint64_t bytes_max, tenant_bytes_max, tier0_window_ns, drr_quantum_ns, pick_charge_ns
        uint64_t aging_wait_ns[4]
    ctypedef struct art_runq_stats:
        uint64_t queued[4]
        uint64_t pushes[4]
        uint64_t pops[4]
        uint64_t promotions_count[4]
        uint64_t promotions_wait[4]
        uint64_t cancels, tier0_capped, refusals, inbox, busy, admitted_items, admitted_bytes
    void art_runq_config_default(art_runq_config *config)
    int art_runq_tenant_set(art_runq *q, uint32_t tenant, uint32_t weight)
    void art_runq_statistics(art_runq *q, art_runq_stats *out)
    uint64_t art_runq_oldest_ns(art_runq *q, uint32_t tier)

cdef extern from "frame.h" nogil:
    enum:
        ART_FRAME_PAGE_BYTES, ART_FRAME_ID_BYTES, ART_FRAME_DIGEST_BYTES, ART_FRAME_SECTIONS_MAX, ART_FRAME_KINDS
    ctypedef struct art_frame_head:
        uint32_t abi
        uint8_t *module
        uint8_t *image
        uint8_t *engine
        uint8_t *id
        uint64_t segment, seq, fuel, clock_ns, memory_bytes
    ctypedef struct art_frame_section:
        uint32_t tag
        const uint8_t *bytes
        uint64_t len
    ctypedef struct art_frame:
        art_frame_head head
        cbool delta
        uint8_t *base_id
        uint32_t check, section_count
        art_frame_section *sections
        uint64_t *page_count
    ctypedef struct art_frame_buf:
        uint8_t *bytes
        size_t len
    ctypedef struct art_frame_image:
        const uint8_t *bytes
        size_t len
    void art_frame_buf_free(art_frame_buf *buf)
    int art_frame_encode(const art_frame_head *head, const art_frame_section *sections, uint32_t section_count,
                         const uint8_t *memory, const art_frame_image *image, const art_frame *base, art_frame_buf *out)
    int art_frame_open(const uint8_t *bytes, size_t len, uint64_t memory_bytes_max, art_frame *out, char *msg,
                       size_t msg_len)
    cbool art_frame_is_base_of(const art_frame *base, const art_frame *frame)
    int art_frame_restore(const art_frame *frame, const art_frame_image *image, const art_frame *base, cbool fresh,
                          uint8_t *memory, char *msg, size_t msg_len)
    const uint8_t *art_frame_section_get(const art_frame *frame, uint32_t tag, uint64_t *len)
    void art_frame_pages(const art_frame *frame, uint8_t *kinds)
    uint32_t art_crc32c(uint32_t crc, const void *bytes, size_t len)
    uint32_t art_crc32c_plain(uint32_t crc, const void *bytes, size_t len)

cdef extern from "wasi.h" nogil:
    ctypedef struct art_wasi_image:
        pass
    ctypedef struct art_wasi_text:
        const char *bytes
        uint32_t len
    ctypedef struct art_wasi_file:
        art_wasi_text path
        const uint8_t *bytes
        uint32_t len
    ctypedef struct art_wasi_config:
        const art_wasi_text *args
        const art_wasi_text *env
        const art_wasi_file *files
        uint32_t args_count, env_count, files_count
    int art_wasi_image_new(const art_wasi_config *config, art_wasi_image **out, char *msg, size_t msg_len)
    void art_wasi_image_release(art_wasi_image *image)

cdef extern from "guest.h" nogil:
    enum:
        ART_MSG_BYTES, ART_REQUEST_UNWINDING
    ctypedef struct art_engine:
        pass
    ctypedef struct art_module:
        pass
    ctypedef struct art_guest:
        pass
    ctypedef struct art_engine_config:
        const char *library
        uint32_t guests_max, stacks_max, table_elements_max, request_bytes_max, result_bytes_max, inflight_max
        uint64_t memory_bytes_max, wasm_stack_bytes
        cbool compile_only, any_cpu
    int art_engine_create(const art_engine_config *config, art_engine **out, char *msg, size_t msg_len)
    void art_engine_destroy(art_engine *engine)
    int art_engine_compile(art_engine *engine, const uint8_t *wasm, size_t len, uint8_t **artifact,
                           size_t *artifact_len, char *msg, size_t msg_len)
    int art_module_load(art_engine *engine, const uint8_t *artifact, size_t len, art_module **out, char *msg,
                        size_t msg_len)
    int art_module_load_reactor(art_engine *engine, const uint8_t *artifact, size_t len, const char *entry,
                                art_module **out, char *msg, size_t msg_len)
    cbool art_module_is_agent(const art_module *module)
    cbool art_module_unwinds(const art_module *module)
    void art_module_release(art_module *module)
    uint32_t art_module_warm(art_module *module, uint32_t count)
    ctypedef struct art_request:
        art_request *next
        int32_t handle, op
        uint32_t len
        uint8_t *payload
    ctypedef struct art_answer:
        pass
    art_answer *art_answer_new(int32_t handle, int32_t status, uint64_t clock_ns, uint64_t seq, const void *payload,
                               uint32_t len)
    ctypedef struct art_guest_config:
        art_module *module
        const void *input
        uint32_t input_len
        const void *restored
        uint32_t restored_len
        uint8_t seed[16]
        uint64_t clock_ns, memory_bytes_max
        cbool replay
        art_wasi_image *wasi
        const art_frame *frame
        const art_frame *frame_base
        const art_frame_image *frame_image
        cbool frame_stays
        int boot
    art_request *art_guest_take_requests(art_guest *guest)
    ctypedef enum art_exit_reason:
        ART_EXIT_RETURNED, ART_EXIT_FAILED, ART_EXIT_TRAP, ART_EXIT_FUEL, ART_EXIT_KILLED, ART_EXIT_ENGINE
        ART_EXIT_UNWOUND
    ctypedef struct art_stream:
        const uint8_t *bytes
        uint32_t len
        uint64_t total
    ctypedef struct art_exit:
        art_exit_reason reason
        int32_t code
        const uint8_t *output
        uint32_t output_len
        const char *message
        art_stream out, err
        uint64_t waits
        int32_t asked

cdef extern from "boot.h" nogil:
    int art_module_begin_at(art_module *module, const uint8_t *begin, size_t len, char *msg, size_t msg_len)

cdef extern from "capture.h" nogil:
    ctypedef struct art_capture_config:
        uint8_t *module
        uint8_t *engine
        uint8_t *id
        uint8_t *image_digest
        uint64_t segment, seq
        const art_frame_image *image
        const art_frame *base
        cbool keep
    cbool art_module_captures(const art_module *module)
    cbool art_module_captures_anywhere(const art_module *module)
    int art_module_initial_memory(art_module *module, uint8_t **out, size_t *out_len, char *msg, size_t msg_len)

cdef extern from "worker.h" nogil:
    ctypedef struct art_pool:
        pass
    ctypedef struct art_run:
        pass
    ctypedef struct art_foreign:
        pass
    ctypedef struct art_pool_config:
        uint32_t workers, live_max
        int nice
        cbool pin
        uint64_t quantum_ns[4]
        uint64_t micro_slice_fuel, base_tier_ops
        art_runq_config runq
        art_engine *engine
    ctypedef struct art_pool_stats:
        uint64_t slices, micro_slices, preemptions, demotions, parks, live, live_max, starved
        uint64_t foreign_grants, foreign_preemptions
        uint64_t slot_ns[4]
        uint64_t waits[4][28]
        uint64_t waited_ns[4]
        int nice
    ctypedef struct art_worker_stats:
        uint64_t slices, preemptions, demotions
        uint64_t slot_ns[4]
    ctypedef enum art_slice_end:
        pass
    ctypedef struct art_slice:
        uint64_t start_ns, end_ns, number
        art_slice_end end
        uint8_t tier
        cbool foreign
    int art_pool_slices(art_pool *pool, uint32_t index, uint64_t since_ns, art_slice *out, uint32_t max)
    uint64_t art_run_number(const art_run *run)
    ctypedef enum art_owner_kind:
        ART_OWNER_RUN, ART_OWNER_FOREIGN
    ctypedef struct art_run_config:
        art_guest_config guest
        uint32_t tenant
        uint8_t tier
        uint64_t fuel
        cbool fuel_final, admitted, safe_point
        void *user
    ctypedef struct art_run_view:
        cbool done, waiting, no_fuel, safe_point
        uint64_t wait_number, fuel_granted, fuel, slot_ns, submitted_ns, first_ns
        const int32_t *handles
        size_t handle_count
        art_exit exit
        uint32_t preemptions, demotions
        uint8_t tier
    ctypedef enum art_foreign_state:
        ART_FOREIGN_QUEUED, ART_FOREIGN_GRANTED, ART_FOREIGN_PREEMPTED, ART_FOREIGN_RELEASED
    int art_pool_create(const art_pool_config *config, art_pool **out)
    void art_pool_stop(art_pool *pool)
    void art_pool_destroy(art_pool *pool)
    art_evq *art_pool_evq(art_pool *pool)
    art_runq *art_pool_runq(art_pool *pool)
    void art_pool_statistics(art_pool *pool, art_pool_stats *out)
    int art_pool_worker_statistics(art_pool *pool, uint32_t index, art_worker_stats *out)
    art_owner_kind art_pool_event_take(art_event *event, art_run **run, art_foreign **foreign)
    int art_run_submit(art_pool *pool, const art_run_config *config, art_run **out)
    void *art_run_user(const art_run *run)
    art_guest *art_run_guest(art_run *run)
    void art_run_answer(art_run *run, art_answer *answer)
    void art_run_go_live(art_run *run)
    void art_run_grant(art_run *run, uint64_t fuel, cbool final)
    int art_run_unwind(art_run *run, int32_t skipped, uint64_t unwind_ns)
    void art_run_kill(art_run *run)
    void art_run_want_safe_point(art_run *run)
    void art_run_leave_safe_point(art_run *run, cbool again)
    int art_run_capture(art_run *run, const art_capture_config *config, art_frame_buf *out, char *msg, size_t msg_len)
    int art_run_fail(art_run *run, char *msg, size_t msg_len)
    int art_run_lend(art_run *run, uint8_t tier)
    uint64_t art_run_ran_ns(const art_run *run)
    uint64_t art_run_fuel(const art_run *run)
    uint64_t art_run_memory_bytes(const art_run *run)
    void art_run_look(art_run *run, art_run_view *out)
    ctypedef enum art_run_phase:
        ART_RUN_QUEUED, ART_RUN_PREEMPTED, ART_RUN_RUNNING, ART_RUN_BLOCKED, ART_RUN_DONE
    art_run_phase art_run_glance(const art_run *run)
    void art_run_free(art_run *run)
    int art_foreign_submit(art_pool *pool, int pidfd, uint32_t tenant, uint8_t tier, void *user, art_foreign **out)
    void *art_foreign_user(const art_foreign *foreign)
    art_foreign_state art_foreign_look(art_foreign *foreign, uint32_t *grants, uint32_t *preemptions)
    int art_foreign_release(art_foreign *foreign)
    int art_foreign_lend(art_foreign *foreign, uint8_t tier)
    void art_foreign_free(art_foreign *foreign)
