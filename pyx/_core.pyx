# cython: language_level=3, binding=False, embedsignature=True
"""Python's hands on the C core: an engine with its pool of workers, modules, guests and foreign tasks.

Threads: `Core` and everything it makes belong to the control loop's thread, except that `Core.load` and `compile_module`
may run on any. The GIL is released around every call that could spin on a core lock, so no core lock is ever waited for with
the GIL held; the core itself never takes the GIL. It is kept around submitting, answering and draining, which are done
for every run, syscall and turn and wait for nobody (a push gives a busy queue 1.5 us, then leaves its task in an inbox):
giving it away would cost up to a switch interval whenever another Python thread runs.

Lifetime: a `Guest` is kept alive by the core from submit until its exit was drained (or the core closed), and by whoever
holds it. Its C side is freed with it.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t
from core cimport *

from array import array
import hashlib
import importlib.metadata
import os

from agentrt import errors
from agentrt.backends.base import Exit, Request

DEF MSG = 4096
DEF DRAIN_MAX = 1024
DEF INPUT_MAX = 0x7fffffff  # a guest sees lengths as i32
DEF COPY_MAX = 65536  # bytes copied with the GIL held

cdef dict ERROR_TYPES = {
    ART_ENOMEM: MemoryError,
    ART_EINVAL: errors.InputError,
    ART_EFULL: errors.QueueFullError,
    ART_ECLOSED: errors.ClosedError,
    ART_EENGINE: errors.EngineError,
    ART_EMODULE: errors.ModuleError,
    ART_EIMPORT: errors.UnknownImportError,
    ART_EENTRY: errors.NoEntryError,
    ART_ELIMIT: errors.ModuleLimitError,
    ART_EVERSION: errors.EngineError,
}


cdef int check(int err, const char *msg=NULL) except -1:
    """The one error translator: returns 0 or raises the exception of the code."""
    if err == 0:
        return 0
    text = art_strerror(err).decode()
    if msg != NULL and msg[0] != 0:
        text = f"{text}: {msg.decode(errors='replace')}"
    raise ERROR_TYPES.get(err, errors.InternalError)(text)


cdef uint32_t length(bytes data, uint64_t most) except? 0xffffffff:
    """The data's length, if the core takes that much; else InputError."""
    if <uint64_t>PyBytes_GET_SIZE(data) > most:
        raise errors.InputError(f"{PyBytes_GET_SIZE(data)} bytes, the limit is {most}")
    return <uint32_t>PyBytes_GET_SIZE(data)


cdef uint8_t floor_of(tier) except? 255:
    """The lowest tier that is allowed, from Python's tier or None."""
    return ART_TIERS if tier is None else tier


cdef bint lent(int err) except? True:
    """Whether a loan is in force, or will be without being asked for again."""
    if err == ART_EBUSY:
        return False
    check(err)
    return True


cdef object new_tuple = tuple.__new__  # a NamedTuple's own constructor is Python


cdef bytes stream(const art_stream *of):
    """The end of what a guest wrote; that its beginning is cut off is said in a first line."""
    if of.bytes == NULL:
        return b""
    cdef bytes kept = PyBytes_FromStringAndSize(<const char *>of.bytes, of.len)
    return kept if of.total == of.len else b"[%d bytes cut]\n" % (of.total - of.len) + kept


cdef tuple RUN_PHASES = ("QUEUED", "PREEMPTED", "RUNNING", None, None)
cdef tuple SLICE_ENDS = ("open", "over", "blocked", "preempted", "spent", "stopped")
cdef enum:
    SLICES_MAX = 4096  # those that a worker keeps
cdef tuple EXIT_REASONS = ("returned", "failed", "trap", "fuel", "killed", "engine", "unwound")


def abi_version() -> int:
    """Version of the guest ABI (csrc/agentrt_guest.h)."""
    return 1


def engine_version() -> str:
    """Version of the wasmtime package."""
    return importlib.metadata.version("wasmtime")


cdef bytes engine_text():
    """The engine's version as it stands in frames."""
    return engine_version().encode()[:ART_FRAME_DIGEST_BYTES].ljust(ART_FRAME_DIGEST_BYTES, b"\0")


cdef class _Limits:
    """The engine's limits, as given by the caller; kept for the artifact key."""

    cdef art_engine_config config
    cdef bytes library
    cdef tuple key

    @staticmethod
    cdef _Limits make(str engine_lib, dict limits, bint compile_only):
        cdef _Limits self = _Limits.__new__(_Limits)
        self.library = os.fsencode(engine_lib)
        self.config.library = self.library
        self.config.guests_max = limits["guests_max"]
        self.config.stacks_max = limits["stacks_max"]
        self.config.memory_bytes_max = limits["memory_bytes_max"]
        self.config.wasm_stack_bytes = limits["wasm_stack_bytes"]
        self.config.table_elements_max = limits["table_elements_max"]
        self.config.request_bytes_max = limits["request_bytes_max"]
        self.config.result_bytes_max = limits["result_bytes_max"]
        self.config.inflight_max = limits["inflight_max"]
        self.config.compile_only = compile_only
        # what is compiled in: code is valid for these only
        self.key = (self.config.wasm_stack_bytes, self.config.table_elements_max)
        return self


def compile_module(engine_lib: str, wasm: bytes, *, bint any_cpu=False, **limits) -> bytes:
    """Compile wasm to an artifact (trusted native code). ``limits`` are those of `Core`. ``any_cpu``: for any CPU of this
    architecture, whatever this one can do. Raises ModuleError and its kinds.

    Takes as long and as much memory as the module makes it: run it in a limited child process."""
    cdef _Limits given = _Limits.make(engine_lib, limits, True)
    given.config.any_cpu = any_cpu
    cdef art_engine *engine = NULL
    cdef char msg[MSG]
    cdef uint8_t *artifact = NULL
    cdef size_t artifact_len = 0
    cdef const uint8_t *code = <const uint8_t *>PyBytes_AS_STRING(wasm)
    cdef size_t code_len = PyBytes_GET_SIZE(wasm)
    cdef int err
    msg[0] = 0
    with nogil:
        err = art_engine_create(&given.config, &engine, msg, MSG)
    check(err, msg)
    with nogil:
        err = art_engine_compile(engine, code, code_len, &artifact, &artifact_len, msg, MSG)
        art_engine_destroy(engine)
    check(err, msg)
    try:
        return PyBytes_FromStringAndSize(<char *>artifact, artifact_len)
    finally:
        free(artifact)


include "frame.pxi"


@cython.no_gc_clear  # __dealloc__ needs the core
cdef class Module:
    """Compiled code, checked against the guest ABI. Made by `Core.load`."""

    cdef art_module *module
    cdef Core core  # the engine must outlive the module
    cdef object __weakref__

    def __cinit__(self):
        self.module = NULL

    def __dealloc__(self):
        art_module_release(self.module)

    @property
    def is_agent(self) -> bool:
        """Whether it is entered by agentrt_run; a WASI program is not, and tells its result on stdout."""
        return art_module_is_agent(self.module)

    @property
    def unwinds(self) -> bool:
        """Whether it has unwinding handlers, the export agentrt_unwind."""
        return art_module_unwinds(self.module)

    @property
    def captures(self) -> bool:
        """Whether its guests can be captured when they wait (docs/frames.md)."""
        return art_module_captures(self.module)

    @property
    def captures_anywhere(self) -> bool:
        """Whether they can be captured while they compute, too."""
        return art_module_captures_anywhere(self.module)

    def warm(self, uint32_t count=1) -> int:
        """Begin so many guests and let go of them, so that others begin quickly, the first one above all; how many there was
        a place for. Any thread but the control loop's."""
        cdef uint32_t found
        with nogil:
            found = art_module_warm(self.module, count)
        return found

    def image(self, bytes digest not None) -> FrameImage:
        """The memory that its guests begin with, under a digest of the module. Any thread. Raises EngineError: there is no
        place for one more guest."""
        cdef char msg[MSG]
        cdef uint8_t *memory = NULL
        cdef size_t memory_len = 0
        cdef int err
        msg[0] = 0
        with nogil:
            err = art_module_initial_memory(self.module, &memory, &memory_len, msg, MSG)
        check(err, msg)
        try:
            return FrameImage(digest, PyBytes_FromStringAndSize(<char *>memory, memory_len))
        finally:
            free(memory)


cdef class WasiImage:
    """Arguments, environment and files of WASI guests: immutable, shared by any number of them.

    ``env``: NAME=value. ``files``: path from the root, without a slash at its beginning, and content. Raises InputError
    for what cannot be, ModuleLimitError past a limit of csrc/wasi.h. Any thread."""

    cdef art_wasi_image *image

    def __cinit__(self):
        self.image = NULL

    def __init__(self, list args not None, list env not None, list files not None):
        cdef art_wasi_config config
        cdef char msg[MSG]
        cdef int err
        cdef size_t args_count = len(args), env_count = len(env), files_count = len(files)
        cdef size_t count = args_count + env_count + files_count + 1
        cdef art_wasi_text *texts = NULL
        cdef art_wasi_file *contents = NULL
        if self.image != NULL:
            raise errors.InternalError("an image is made once")
        msg[0] = 0
        texts = <art_wasi_text *>malloc(count * sizeof(art_wasi_text))
        contents = <art_wasi_file *>malloc(count * sizeof(art_wasi_file))
        try:
            if texts == NULL or contents == NULL:
                raise MemoryError
            for i in range(args_count):
                text(args[i], &texts[i])
            for i in range(env_count):
                text(env[i], &texts[args_count + i])
            for i in range(files_count):
                path, content = files[i]
                text(path, &contents[i].path)
                contents[i].bytes = <const uint8_t *>PyBytes_AS_STRING(content)
                contents[i].len = length(content, INPUT_MAX)
            config.args = texts
            config.env = texts + args_count
            config.files = contents
            config.args_count = <uint32_t>args_count
            config.env_count = <uint32_t>env_count
            config.files_count = <uint32_t>files_count
            with nogil:
                err = art_wasi_image_new(&config, &self.image, msg, MSG)
            check(err, msg)
        finally:
            free(texts)
            free(contents)

    def __dealloc__(self):
        art_wasi_image_release(self.image)


cdef int text(bytes of, art_wasi_text *to) except -1:
    to.bytes = PyBytes_AS_STRING(of)
    to.len = length(of, INPUT_MAX)
    return 0


@cython.no_gc_clear  # __dealloc__ needs the core
cdef class Guest:
    """One execution of a module. Made by `Core.submit`."""

    cdef art_run *run
    cdef readonly object owner
    cdef Core core
    cdef uint64_t reported_wait, reported_fuel
    cdef bint exited
    cdef tuple frames  # what it goes on from: borrowed by the core
    cdef bint told, unwinding  # `unwind` was called; its handlers have begun

    def __cinit__(self):
        self.run = NULL
        self.reported_fuel = <uint64_t>-1

    def __dealloc__(self):
        if self.run != NULL:
            art_run_free(self.run)

    def complete(self, int32_t handle, int32_t status, bytes payload not None, uint64_t clock_ns, uint64_t seq):
        """Answer a syscall: status 0 with a result, 1 with an error (JSON). Ignored when the guest has ended. Raises
        InputError when the payload is longer than ``result_bytes_max``."""
        cdef art_answer *answer
        cdef uint32_t size = length(payload, self.core.limits.config.result_bytes_max)
        if self.exited:
            return
        answer = art_answer_new(handle, status, clock_ns, seq, PyBytes_AS_STRING(payload), size)
        if answer == NULL:
            raise MemoryError
        art_run_answer(self.run, answer)

    def go_live(self):
        """The replay is over (see agentrt.backends.base.Guest)."""
        if not self.exited:
            with nogil:
                art_run_go_live(self.run)

    def grant(self, uint64_t fuel, bint final):
        """Add fuel; ``final`` says that no more will come."""
        if not self.exited:
            with nogil:
                art_run_grant(self.run, fuel, final)

    @property
    def scheduler_state(self):
        """QUEUED, PREEMPTED or RUNNING as the core sees it now; None while it waits and when it has ended."""
        return RUN_PHASES[<int>art_run_glance(self.run)]

    def lend(self, tier):
        """Until told otherwise it runs at no lower tier than this, wherever it is now, and is not demoted from it; None
        ends that. False: it is just being queued or picked; ask again in a moment."""
        cdef uint8_t floor = floor_of(tier)
        cdef int err
        if self.exited:
            return True
        with nogil:
            err = art_run_lend(self.run, floor)
        return lent(err)

    def want_safe_point(self):
        """Have it stop at its next safe point, if its module has such (`Module.captures_anywhere`): the event "safe_point"
        follows, unless it waits or ends first."""
        if not self.exited:
            art_run_want_safe_point(self.run)

    def leave_safe_point(self, bint again=False):
        """Have it go on from there, or not stop any more; ``again``: to the next one."""
        if not self.exited:
            with nogil:
                art_run_leave_safe_point(self.run, again)

    def capture(self, FrameEncoder to not None, *, bytes module not None, bytes id not None, uint64_t segment,
                uint64_t seq, FrameImage image=None, Frame base=None, bint keep=True) -> int:
        """Make a frame of the guest in ``to`` (see `FrameEncoder.encode`; `Core.submit` goes on from it); its length. It must
        wait for an answer, or stand at a safe point. With ``keep`` it then stands there as before; without it ends, and the
        exit event follows, with reason "killed". Any thread but the control loop's: it takes as long as copying the
        memory. Raises FrameError: that cannot be now, or, with the exit event following, the module is not what it says."""
        cdef art_capture_config config
        cdef char msg[MSG]
        cdef int err
        msg[0] = 0
        config.segment = segment
        config.seq = seq
        config.keep = keep
        config.image = NULL if image is None else &image.image
        config.base = NULL if base is None else &base.frame
        take_bytes(config.module, ART_FRAME_DIGEST_BYTES, module, "module")
        take_bytes(config.id, ART_FRAME_ID_BYTES, id, "id")
        take_bytes(config.engine, ART_FRAME_DIGEST_BYTES, engine_text(), "engine")
        take_bytes(config.image_digest, ART_FRAME_DIGEST_BYTES, bytes(32) if image is None else image.digest, "image")
        if self.exited:
            raise errors.FrameError("the guest has ended")
        to.take()
        with nogil:
            err = art_run_capture(self.run, &config, &to.buf, msg, MSG)
        to.busy = False
        if err:
            raise errors.FrameError(msg.decode(errors="replace") if msg[0] else art_strerror(err).decode())
        return to.buf.len

    @property
    def ran_ns(self):
        """Slot time so far, some microseconds late; 0 when it has ended."""
        return 0 if self.exited else art_run_ran_ns(self.run)

    @property
    def fuel_used(self):
        """Work so far, in fuel, as old as `ran_ns`; 0 when it has ended."""
        return 0 if self.exited else art_run_fuel(self.run)

    @property
    def memory_bytes(self):
        """Length of its memory, as old as `ran_ns`; 0 when it has ended."""
        return 0 if self.exited else art_run_memory_bytes(self.run)

    def unwind(self, str reason not None, int32_t skipped=0, uint64_t unwind_ns=200_000_000):
        """Stop the program at the first wait that the answers given so far do not end, and run its handlers, the export
        ``agentrt_unwind``; its exit event follows, with reason "unwound". A wasm guest is not told the ``reason``.

        From now on the program's syscalls are not reported, log lines excepted. The event "unwinding" says that the
        handlers begin: what follows they ask for, with further handles. There is none, and the exit comes at once, if
        the module has none or the guest never ran (but in replay that is not known, and it runs to its first wait).
        ``skipped`` handles are left out before theirs: an earlier guest of the run has used them.

        ``unwind_ns``: slot time for the way to that wait, unless it is in replay, and as much again for the handlers
        (ten times that in replay, and afresh when it is live). Past it the exit has a message. Called again: nothing.
        Raises MemoryError."""
        cdef int err
        if self.exited or self.told:
            return
        if skipped < 0:
            raise errors.InputError(f"{skipped} handles cannot be skipped")
        with nogil:
            err = art_run_unwind(self.run, skipped, unwind_ns)
        check(err)
        self.told = True

    def kill(self):
        """End the guest; its exit event follows."""
        if not self.exited:
            with nogil:
                art_run_kill(self.run)

    def fail(self):
        """End a guest that waits for an answer, or stands at a safe point, as if it had failed there: its exit event follows,
        with the backtrace. Raises FrameError: it does not. Any thread."""
        cdef char msg[MSG]
        cdef int err
        msg[0] = 0
        if self.exited:
            raise errors.FrameError("the guest has ended")
        with nogil:
            err = art_run_fail(self.run, msg, MSG)
        if err:
            raise errors.FrameError(msg.decode(errors="replace"))

    cdef object event(self, list out):
        """What to tell the owner after this guest's event was taken; None if nothing is new. What must be told before
        goes to ``out``."""
        cdef art_run_view view
        cdef art_request *request
        cdef art_request *following
        cdef list requests = []
        cdef object waiting = None
        art_run_look(self.run, &view)
        request = art_guest_take_requests(art_run_guest(self.run))
        while request != NULL:
            following = request.next
            if request.handle == ART_REQUEST_UNWINDING:
                if requests:
                    out.append((self.owner, "syscalls", requests, None))
                    requests = []
                out.append((self.owner, "unwinding", [], None))
                self.unwinding = True
            elif not self.told or self.unwinding or request.handle == 0:  # else the program's, and too late
                requests.append(new_tuple(Request, (
                    request.handle, request.op, PyBytes_FromStringAndSize(<char *>request.payload, request.len))))
            free(request)
            request = following
        if self.frames is not None and (requests or view.waiting or view.safe_point):
            self.frames = None  # it has gone on from them
        if view.done:
            self.exited = True
            # What it did after its last wait depended on the answer to that, without which it can be brought back.
            cut = view.exit.waits and view.exit.reason in (ART_EXIT_TRAP, ART_EXIT_FUEL, ART_EXIT_UNWOUND)
            exit = new_tuple(Exit, (
                EXIT_REASONS[<int>view.exit.reason], view.exit.code,
                PyBytes_FromStringAndSize(<char *>view.exit.output, view.exit.output_len)
                if view.exit.output != NULL else None,
                view.exit.message.decode(errors="replace") if view.exit.message[0] else "", view.fuel, view.slot_ns,
                view.submitted_ns, view.first_ns, view.preemptions, view.demotions, stream(&view.exit.out),
                stream(&view.exit.err),
                view.exit.waits - 1 if cut else -1, view.exit.asked if cut else -1))
            return (self.owner, "exit", requests, exit)
        if view.no_fuel and view.fuel_granted != self.reported_fuel:
            self.reported_fuel = view.fuel_granted
            return (self.owner, "fuel", requests, None)
        if view.safe_point and view.wait_number != self.reported_wait:
            self.reported_wait = view.wait_number
            return (self.owner, "safe_point", requests, None)
        if view.waiting and view.wait_number != self.reported_wait:
            self.reported_wait = view.wait_number
            waiting = tuple([view.handles[i] for i in range(view.handle_count)])
        elif not requests:
            return None
        return (self.owner, "syscalls", requests, waiting)


@cython.no_gc_clear  # __dealloc__ needs the core
cdef class Foreign:
    """A slot asked for on behalf of another process. Made by `Core.submit_foreign`."""

    cdef art_foreign *foreign
    cdef readonly object owner
    cdef bint released
    cdef tuple reported
    cdef Core core

    def __cinit__(self):
        self.foreign = NULL

    def __dealloc__(self):
        if self.foreign != NULL:
            art_foreign_free(self.foreign)

    def release(self):
        """Give the slot back, or stop asking for one. The "released" event is the last. False: the queue is held up, and
        it may take long; ask again in a moment."""
        cdef int err = 0
        if not self.released:
            with nogil:
                err = art_foreign_release(self.foreign)
        return lent(err)

    def lend(self, tier):
        """As `Guest.lend`."""
        cdef uint8_t floor = floor_of(tier)
        cdef int err
        if self.released:
            return True
        with nogil:
            err = art_foreign_lend(self.foreign, floor)
        return lent(err)

    cdef object event(self):
        cdef uint32_t grants, preemptions
        cdef art_foreign_state state = art_foreign_look(self.foreign, &grants, &preemptions)
        name = ("queued", "granted", "preempted", "released")[<int>state]
        if (name, grants, preemptions) == self.reported:
            return None
        self.reported = (name, grants, preemptions)
        self.released = state == ART_FOREIGN_RELEASED
        return (self.owner, name, [], (grants, preemptions))


cdef class Core:
    """An engine and its workers.

    Limits: ``guests_max`` instances and ``stacks_max`` started guests of ``memory_bytes_max`` and ``wasm_stack_bytes``
    each; ``table_elements_max``; ``request_bytes_max`` and ``result_bytes_max`` per syscall; ``inflight_max`` handles
    per guest. Scheduling: ``workers`` slots, ``micro_slice_fuel``, ``quantum_ns`` per tier, ``queue_items_max`` and
    ``queue_bytes_max`` admitted runs, ``aging_threshold`` picks, ``aging_wait_ns`` per tier, ``tier0_share_pct``,
    ``tenants_max``; ``base_tier_ops`` is a mask of op numbers (1 << op) that return a run to its base tier. Workers run at
    ``nice``, each pinned to a CPU if ``pin``. Raises EngineError, InputError.
    """

    cdef art_engine *engine
    cdef art_pool *pool
    cdef _Limits limits
    cdef readonly bint closed
    cdef set alive  # guests and foreigns that may still produce events

    def __cinit__(self):
        self.engine = NULL
        self.pool = NULL

    def __init__(self, *, str engine_lib, uint32_t workers, uint64_t micro_slice_fuel, tuple quantum_ns,
                 uint32_t guests_max, uint32_t stacks_max, uint64_t memory_bytes_max, uint64_t wasm_stack_bytes,
                 uint32_t table_elements_max, uint32_t request_bytes_max, uint32_t result_bytes_max,
                 uint32_t inflight_max, uint32_t queue_items_max, uint64_t queue_bytes_max, uint32_t aging_threshold,
                 tuple aging_wait_ns, uint32_t tier0_share_pct, uint32_t tenants_max, uint64_t base_tier_ops, int nice,
                 bint pin):
        cdef char msg[MSG]
        cdef art_pool_config config
        cdef int err, i
        msg[0] = 0
        self.limits = _Limits.make(engine_lib, dict(
            guests_max=guests_max, stacks_max=stacks_max, memory_bytes_max=memory_bytes_max,
            wasm_stack_bytes=wasm_stack_bytes, table_elements_max=table_elements_max,
            request_bytes_max=request_bytes_max, result_bytes_max=result_bytes_max, inflight_max=inflight_max), False)
        with nogil:
            err = art_engine_create(&self.limits.config, &self.engine, msg, MSG)
        check(err, msg)
        config.workers = workers
        config.nice = nice
        config.pin = pin
        for i in range(4):
            config.quantum_ns[i] = quantum_ns[i]
        config.micro_slice_fuel = micro_slice_fuel
        config.live_max = stacks_max
        config.base_tier_ops = base_tier_ops
        config.engine = self.engine
        art_runq_config_default(&config.runq)
        config.runq.max_tenants = tenants_max
        config.runq.items_max = queue_items_max
        config.runq.bytes_max = queue_bytes_max
        config.runq.aging_threshold = aging_threshold
        config.runq.tier0_share_pct = tier0_share_pct
        for i in range(4):
            config.runq.aging_wait_ns[i] = aging_wait_ns[i]
        self.alive = set()
        with nogil:
            err = art_pool_create(&config, &self.pool)
        check(err)

    def __dealloc__(self):
        if self.pool != NULL:
            with nogil:
                art_pool_stop(self.pool)
                art_pool_destroy(self.pool)
        art_engine_destroy(self.engine)

    def __del__(self):
        # Before anything is cleared: guests must not be freed under running workers.
        self.close()

    cdef int require_open(self) except -1:
        if self.closed or self.pool == NULL:
            raise errors.ClosedError("the core is closed")
        return 0

    @property
    def fd(self) -> int:
        """An eventfd, readable when `drain` has something."""
        self.require_open()
        return art_evq_fd(art_pool_evq(self.pool))

    def artifact_key(self) -> bytes:
        """What an artifact depends on besides its module: 16 bytes for cache keys."""
        library = os.fsdecode(self.limits.library)
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as f:
            flags = next((line for line in f if line.startswith(("flags", "Features"))), "")
        parts = (engine_version(), os.stat(library).st_size, abi_version(), self.limits.key, flags)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()

    def load(self, bytes artifact not None, bytes entry=None, bytes begin=None) -> Module:
        """Load an authentic artifact of `compile_module`. ``entry`` names the main function of a WASI reactor; ``begin``: where
        guests of an image begin (agentrt.capture.image). Raises ModuleError and its kinds. Any thread."""
        cdef Module module = Module.__new__(Module)
        cdef char msg[MSG]
        cdef int err
        cdef const uint8_t *code = <const uint8_t *>PyBytes_AS_STRING(artifact)
        cdef size_t code_len = PyBytes_GET_SIZE(artifact)
        cdef const char *main = NULL if entry is None else PyBytes_AS_STRING(entry)
        self.require_open()
        msg[0] = 0
        module.core = self
        with nogil:
            if main == NULL:
                err = art_module_load(self.engine, code, code_len, &module.module, msg, MSG)
            else:
                err = art_module_load_reactor(self.engine, code, code_len, main, &module.module, msg, MSG)
        check(err, msg)
        if begin is not None:
            msg[0] = 0
            check(art_module_begin_at(module.module, <const uint8_t *>PyBytes_AS_STRING(begin), PyBytes_GET_SIZE(begin),
                                      msg, MSG), msg)
        return module

    def tenant(self, uint32_t index, uint32_t weight):
        """Set a tenant's weight (1 to 1,000,000)."""
        cdef int err
        self.require_open()
        with nogil:
            err = art_runq_tenant_set(art_pool_runq(self.pool), index, weight)
        check(err)

    def submit(self, Module module not None, owner, uint32_t tenant, uint8_t tier, bytes input not None,
               bytes restored, uint64_t fuel, bytes seed not None, uint64_t clock_ns, bint admitted, bint replay,
               bint fuel_final=True, WasiImage wasi=None, Frame frame=None, Frame frame_base=None,
               FrameImage frame_image=None, bint safe_point=False, uint64_t memory_bytes_max=0,
               str boot=None, bint stays=False) -> Guest:
        """Queue a guest. ``owner`` comes back with its events. ``seed``: 16 bytes. ``frame``: it goes on from there, with
        all else as for the guest that it was taken of (``frame_base``: if it is a delta; ``frame_image``: if it was
        made with one); a frame that does not fit ends it, with reason "engine". ``safe_point``: it stops at the
        first one, as after `Guest.want_safe_point`. ``memory_bytes_max``: its own, if it is less than the core's.
        ``boot``: it stops for good, as at a safe point, when it is at "rest", its entry having returned 0, or is about
        to read its "input", stdin. ``stays``: if its frame was taken at a safe point it stops there. Raises QueueFullError
        unless ``admitted``."""
        cdef Guest guest = Guest.__new__(Guest)
        cdef art_run_config config
        cdef int err
        self.require_open()
        if module.core is not self:
            raise errors.InputError("the module belongs to another core")
        if PyBytes_GET_SIZE(seed) != 16:
            raise errors.InputError("a seed has 16 bytes")
        guest.owner = owner
        guest.core = self
        config.guest.module = module.module
        config.guest.input = PyBytes_AS_STRING(input)
        config.guest.input_len = length(input, INPUT_MAX)
        config.guest.restored = NULL
        config.guest.restored_len = 0
        if restored is not None:
            config.guest.restored = PyBytes_AS_STRING(restored)
            config.guest.restored_len = length(restored, INPUT_MAX)
        memcpy(config.guest.seed, PyBytes_AS_STRING(seed), 16)
        config.guest.clock_ns = clock_ns
        config.guest.memory_bytes_max = memory_bytes_max
        config.guest.replay = replay
        config.guest.wasi = NULL if wasi is None else wasi.image
        if frame is not None and frame_image is not None and frame.image != frame_image.digest:
            raise errors.FrameError("the image is another than the one the frame was made with")
        config.guest.boot = 0 if boot is None else BOOTS[boot]
        config.guest.frame = NULL if frame is None else &frame.frame
        config.guest.frame_base = NULL if frame_base is None else &frame_base.frame
        config.guest.frame_image = NULL if frame_image is None else &frame_image.image
        config.guest.frame_stays = stays
        guest.frames = (frame, frame_base, frame_image)
        config.tenant = tenant
        config.tier = tier
        config.fuel = fuel
        config.fuel_final = fuel_final
        config.admitted = admitted
        config.safe_point = safe_point
        config.user = <void *>guest
        self.alive.add(guest)  # released when its exit was drained
        if config.guest.input_len > COPY_MAX or config.guest.restored_len > COPY_MAX:
            with nogil:
                err = art_run_submit(self.pool, &config, &guest.run)
        else:
            err = art_run_submit(self.pool, &config, &guest.run)
        if err:
            self.alive.discard(guest)
            check(err)
        return guest

    def submit_foreign(self, owner, int pidfd, *, uint32_t tenant, uint8_t tier) -> Foreign:
        """Ask for a slot for the process behind ``pidfd`` (-1: nothing is signalled; the caller keeps it open)."""
        cdef Foreign foreign = Foreign.__new__(Foreign)
        cdef int err
        self.require_open()
        foreign.owner = owner
        foreign.core = self
        self.alive.add(foreign)
        with nogil:
            err = art_foreign_submit(self.pool, pidfd, tenant, tier, <void *>foreign, &foreign.foreign)
        if err:
            self.alive.discard(foreign)
        check(err)
        return foreign

    def drain(self, size_t max=256) -> list:
        """What has happened: tuples (owner, kind, requests, detail), at most ``max``, higher tiers first.

        kind "syscalls": detail is the tuple of handles the guest waits for, or None while it runs. kind "exit": detail is
        an agentrt.backends.base.Exit. kind "unwinding": see `Guest.unwind`. kind "fuel": the guest needs a grant. kind "safe_point": see
        `Guest.want_safe_point`. Foreigns:
        "granted", "preempted", "released" with (grants, preemptions). ``requests``: agentrt.backends.base.Request, new
        syscalls in program order; a log line has handle 0."""
        cdef art_event *events[DRAIN_MAX]
        cdef size_t count, i
        cdef art_run *run = NULL
        cdef art_foreign *foreign = NULL
        cdef Guest guest
        cdef Foreign other
        cdef list out = []
        self.require_open()
        if max > DRAIN_MAX:
            max = DRAIN_MAX
        count = art_evq_drain(art_pool_evq(self.pool), events, max)
        for i in range(count):
            if art_pool_event_take(events[i], &run, &foreign) == ART_OWNER_RUN:
                guest = <Guest>art_run_user(run)
                event = guest.event(out)
                if guest.exited:
                    self.alive.discard(guest)
                    guest.owner = None  # breaks the cycle of owner and guest
            else:
                other = <Foreign>art_foreign_user(foreign)
                event = other.event()
                if other.released:
                    self.alive.discard(other)
                    other.owner = None
            if event is not None:
                out.append(event)
        return out

    def statistics(self) -> dict:
        """Counters since the core was made; times in ns; lists are per tier, ``workers`` per worker. ``waits`` are waits
        for a slot: the first of each list below 2^10 ns, each further one below twice that, the last the rest."""
        cdef art_worker_stats worker
        cdef uint32_t index = 0
        cdef art_pool_stats pool
        cdef art_runq_stats queue
        cdef art_evq_stats events
        self.require_open()
        with nogil:
            art_pool_statistics(self.pool, &pool)
            art_runq_statistics(art_pool_runq(self.pool), &queue)
            events = art_evq_statistics(art_pool_evq(self.pool))
        workers = []
        while art_pool_worker_statistics(self.pool, index, &worker) == 0:
            workers.append({
                "slices": worker.slices, "preemptions": worker.preemptions, "demotions": worker.demotions,
                "slot_ns": list(worker.slot_ns),
            })
            index += 1
        return {
            "slices": pool.slices, "micro_slices": pool.micro_slices, "preemptions": pool.preemptions,
            "waits": [list(pool.waits[tier]) for tier in range(4)], "waited_ns": list(pool.waited_ns), "workers": workers,
            "demotions": pool.demotions, "parks": pool.parks, "slot_ns": list(pool.slot_ns), "live": pool.live,
            "live_peak": pool.live_max, "starved": pool.starved, "foreign_grants": pool.foreign_grants,
            "foreign_preemptions": pool.foreign_preemptions, "nice": pool.nice, "queued": list(queue.queued),
            "pushes": list(queue.pushes), "pops": list(queue.pops), "promotions_count": list(queue.promotions_count),
            "promotions_wait": list(queue.promotions_wait), "tier0_capped": queue.tier0_capped,
            "refusals": queue.refusals, "admitted": queue.admitted_items, "admitted_bytes": queue.admitted_bytes,
            "events": events.drained, "bells": events.rung,
        }

    def slices(self, uint64_t since_ns, uint32_t most=256) -> tuple:
        """For each worker, the slices in its slot since that time (CLOCK_MONOTONIC), oldest first, the longest ``most`` of
        them: (start_ns, end_ns, tier, how it ended, number, foreign), and how many there were. Workers keep the last 4,095.
        And the owners, by number, of those guests that have not ended. On the thread that drains."""
        cdef uint32_t index = 0
        cdef uint64_t least_ns
        cdef int count, i
        cdef art_slice *found
        self.require_open()
        found = <art_slice *>malloc(SLICES_MAX * sizeof(art_slice))
        if found == NULL:
            raise MemoryError()
        workers = []
        try:
            while True:
                with nogil:
                    count = art_pool_slices(self.pool, index, since_ns, found, SLICES_MAX)
                if count < 0:
                    break
                least_ns = 0
                if <uint32_t>count > most:
                    least_ns = sorted([found[i].end_ns - found[i].start_ns for i in range(count)])[count - most]
                slices = [
                    (found[i].start_ns, found[i].end_ns, found[i].tier, SLICE_ENDS[<int>found[i].end], found[i].number,
                     bool(found[i].foreign))
                    for i in range(count - 1, -1, -1) if found[i].end_ns - found[i].start_ns >= least_ns
                ]
                workers.append((slices[max(0, len(slices) - <int>min(most, SLICES_MAX)):], count))
                index += 1
        finally:
            free(found)
        wanted = {each[4] for of_worker in workers for each in of_worker[0] if not each[5]}
        owners = {}
        for entity in self.alive:
            if isinstance(entity, Guest) and (<Guest>entity).run != NULL:
                number = art_run_number((<Guest>entity).run)
                if number in wanted:
                    owners[number] = (<Guest>entity).owner
        return workers, owners

    def close(self):
        """Stop and join the workers. No event follows; guests that have not ended are gone. Safe to call twice."""
        if self.closed or self.pool == NULL:
            return
        self.closed = True
        with nogil:
            art_pool_stop(self.pool)
        for entity in list(self.alive):
            if isinstance(entity, Guest):
                (<Guest>entity).exited = True
                (<Guest>entity).owner = None
            else:
                (<Foreign>entity).released = True
                (<Foreign>entity).owner = None
        self.alive.clear()


include "capture.pxi"
