# Frames: csrc/frame.h for Python. Part of _core.pyx.

cdef int take_bytes(uint8_t *to, size_t size, bytes value, str name) except -1:
    """A field of the header: as many bytes as it has."""
    if <size_t>PyBytes_GET_SIZE(value) != size:
        raise errors.InputError(f"{name}: {PyBytes_GET_SIZE(value)} bytes, not {size}")
    memcpy(to, PyBytes_AS_STRING(value), size)
    return 0


cdef class FrameImage:
    """The memory of a guest when it began, and its digest of 32 bytes, which is not all zeros."""

    cdef readonly bytes digest, memory
    cdef art_frame_image image

    def __init__(self, bytes digest not None, bytes memory not None):
        if len(digest) != ART_FRAME_DIGEST_BYTES or not any(digest):
            raise errors.InputError("the digest of an image has 32 bytes and is not all zeros")
        self.digest = digest
        self.memory = memory
        self.image.bytes = <const uint8_t *>PyBytes_AS_STRING(memory)
        self.image.len = PyBytes_GET_SIZE(memory)


cdef class Frame:
    """A frame, opened: its header, sections and table of pages are as they were written. Raises FrameError if not.

    ``data``: a bytes-like object, kept. ``memory_bytes_max``: larger memories are refused before anything is made of them.
    Attributes: ``abi``, ``module``, ``image``, ``engine``, ``id``, ``segment``, ``seq``, ``fuel``, ``clock_ns``,
    ``memory_bytes``, ``sections`` (by tag), ``base_id`` (None: it is no delta), ``check`` (of its content), ``pages`` (how
    many are "zero", "image", "base", "whole", "image_patch", "base_patch")."""

    cdef art_frame frame
    cdef Py_buffer view
    cdef bint held

    def __cinit__(self):
        self.held = False

    def __init__(self, data, *, uint64_t memory_bytes_max):
        cdef char msg[MSG]
        cdef int err
        if self.held:
            raise errors.InputError("a frame is opened once")
        msg[0] = 0
        PyObject_GetBuffer(data, &self.view, PyBUF_SIMPLE)
        self.held = True
        with nogil:
            err = art_frame_open(<const uint8_t *>self.view.buf, self.view.len, memory_bytes_max, &self.frame, msg, MSG)
        if err:
            raise errors.FrameError(msg.decode(errors="replace"))

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)

    @property
    def abi(self):
        return self.frame.head.abi

    @property
    def module(self):
        return PyBytes_FromStringAndSize(<const char *>self.frame.head.module, ART_FRAME_DIGEST_BYTES)

    @property
    def image(self):
        return PyBytes_FromStringAndSize(<const char *>self.frame.head.image, ART_FRAME_DIGEST_BYTES)

    @property
    def engine(self):
        raw = PyBytes_FromStringAndSize(<const char *>self.frame.head.engine, ART_FRAME_DIGEST_BYTES)
        return raw.rstrip(b"\0").decode("utf-8", "replace")

    @property
    def id(self):
        return PyBytes_FromStringAndSize(<const char *>self.frame.head.id, ART_FRAME_ID_BYTES)

    @property
    def segment(self):
        return self.frame.head.segment

    @property
    def seq(self):
        return self.frame.head.seq

    @property
    def fuel(self):
        return self.frame.head.fuel

    @property
    def clock_ns(self):
        return self.frame.head.clock_ns

    @property
    def memory_bytes(self):
        return self.frame.head.memory_bytes

    @property
    def base_id(self):
        if not self.frame.delta:
            return None
        return PyBytes_FromStringAndSize(<const char *>self.frame.base_id, ART_FRAME_ID_BYTES)

    @property
    def check(self):
        return self.frame.check

    @property
    def pages(self):
        return {name: self.frame.page_count[i] for i, name in enumerate(PAGE_KINDS)}

    @property
    def sections(self):
        return {
            self.frame.sections[i].tag:
                PyBytes_FromStringAndSize(<const char *>self.frame.sections[i].bytes, self.frame.sections[i].len)
            for i in range(self.frame.section_count)
        }

    @property
    def next_handle(self):
        """The handle of the next syscall of the guest that it was taken of."""
        cdef uint64_t size = 0
        cdef int32_t handle = 0
        cdef const uint8_t *at = art_frame_section_get(&self.frame, 3, &size)
        if at == NULL or size < 12:
            raise errors.FrameError("it is of no guest")
        memcpy(&handle, at + 8, sizeof(handle))
        return handle

    def page_kinds(self) -> bytes:
        """A byte for each page of 4 KiB: an index into `PAGE_KINDS`."""
        cdef bytes kinds = PyBytes_FromStringAndSize(NULL, self.frame.head.memory_bytes // ART_FRAME_PAGE_BYTES)
        art_frame_pages(&self.frame, <uint8_t *>PyBytes_AS_STRING(kinds))
        return kinds

    def is_base_of(self, Frame frame not None) -> bool:
        """Whether ``frame`` is a delta against this one."""
        return art_frame_is_base_of(&self.frame, &frame.frame)

    def memory(self, *, FrameImage image=None, Frame base=None) -> bytes:
        """The memory it was made of. ``image``: that of its guest, if it was made with one; ``base``: if it is a delta.
        Raises FrameError: these are missing or others, or a page is damaged."""
        cdef bytes out
        cdef uint8_t *to
        cdef char msg[MSG]
        cdef int err
        if image is not None and self.image != image.digest:
            raise errors.FrameError("the image is another than the one it was made with")
        out = PyBytes_FromStringAndSize(NULL, self.frame.head.memory_bytes)
        to = <uint8_t *>PyBytes_AS_STRING(out)
        msg[0] = 0
        with nogil:
            err = art_frame_restore(&self.frame, NULL if image is None else &image.image,
                                    NULL if base is None else &base.frame, False, to, msg, MSG)
        if err:
            raise errors.FrameError(msg.decode(errors="replace"))
        return out


cdef class FrameBytes:
    """Room for a frame of ``size`` bytes, whatever is in it: a buffer for whoever reads one into it (`readinto`). Unlike bytes it is
    given back without the GIL, which takes the kernel 0.2 us a page. Raises MemoryError."""

    cdef uint8_t *bytes
    cdef Py_ssize_t size, looks

    def __cinit__(self, Py_ssize_t size):
        self.looks = 0
        self.size = max(size, 0)
        self.bytes = <uint8_t *>malloc(self.size if self.size else 1)
        if self.bytes == NULL:
            raise MemoryError

    def __dealloc__(self):
        with nogil:
            free(self.bytes)

    def __len__(self):
        return self.size

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.bytes, self.size, 0, flags)
        self.looks += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.looks -= 1

    @property
    def looked_at(self):
        """Whether somebody has a view of it."""
        return self.looks != 0


cdef class FrameEncoder:
    """Makes frames, one after the other, in one buffer, which is the object's own (`memoryview`); while somebody looks at it no
    other frame can be made. One thread at a time."""

    cdef art_frame_buf buf
    cdef Py_ssize_t shape, looks
    cdef bint busy

    def __cinit__(self):
        self.looks = 0
        self.busy = False

    def __dealloc__(self):
        with nogil:  # to give back a large one takes the kernel a while
            art_frame_buf_free(&self.buf)

    def __len__(self):
        return self.buf.len

    def __getbuffer__(self, Py_buffer *view, int flags):
        if self.busy:
            raise BufferError("a frame is being made")
        if flags & PyBUF_WRITABLE:
            raise BufferError("frames are read-only")
        self.shape = self.buf.len
        PyBuffer_FillInfo(view, self, self.buf.bytes if self.buf.len else <void *>b"", self.shape, 1, flags)
        self.looks += 1

    def __releasebuffer__(self, Py_buffer *view):
        self.looks -= 1

    @property
    def looked_at(self):
        """Whether it is, so that no other frame can be made now."""
        return self.looks != 0 or self.busy

    cdef int take(self) except -1:
        """Nobody else may use it until `busy` is false again."""
        if self.looks or self.busy:
            raise errors.InputError("the last frame is still being looked at")
        self.busy = True
        return 0

    def encode(self, memory, *, bytes module not None, str engine not None, bytes id not None, uint64_t segment,
               uint64_t seq, uint64_t fuel, uint64_t clock_ns, dict sections not None, FrameImage image=None,
               Frame base=None, uint32_t abi=1) -> int:
        """Make a frame of ``memory``, a bytes-like object of whole pages; how many bytes it takes. ``module``: a digest of 32
        bytes; ``id``: 16 bytes, no other frame's of the run; ``sections``: bytes by tag. ``image``: pages as in it are left
        out; ``base``: a full frame, for a delta. Raises InputError."""
        cdef art_frame_head head
        cdef art_frame_section parts[ART_FRAME_SECTIONS_MAX]
        cdef uint32_t count = 0
        cdef Py_buffer view
        cdef int err
        cdef bytes text = engine.encode()
        if len(sections) > ART_FRAME_SECTIONS_MAX:
            raise errors.InputError(f"{len(sections)} sections, at most {ART_FRAME_SECTIONS_MAX}")
        if len(text) > ART_FRAME_DIGEST_BYTES:
            raise errors.InputError("the engine's version has 32 bytes at most")
        head.abi = abi
        head.segment = segment
        head.seq = seq
        head.fuel = fuel
        head.clock_ns = clock_ns
        take_bytes(head.module, ART_FRAME_DIGEST_BYTES, module, "module")
        take_bytes(head.id, ART_FRAME_ID_BYTES, id, "id")
        take_bytes(head.engine, ART_FRAME_DIGEST_BYTES, text.ljust(ART_FRAME_DIGEST_BYTES, b"\0"), "engine")
        take_bytes(head.image, ART_FRAME_DIGEST_BYTES, bytes(32) if image is None else image.digest, "image")
        for tag, value in sections.items():
            parts[count].tag = tag
            parts[count].bytes = <const uint8_t *>PyBytes_AS_STRING(value)
            parts[count].len = PyBytes_GET_SIZE(value)
            count += 1
        PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE)
        try:
            self.take()
        except errors.InputError:
            PyBuffer_Release(&view)
            raise
        head.memory_bytes = view.len
        with nogil:
            err = art_frame_encode(&head, parts, count, <const uint8_t *>view.buf,
                                   NULL if image is None else &image.image, NULL if base is None else &base.frame,
                                   &self.buf)
        self.busy = False
        PyBuffer_Release(&view)
        check(err)
        return self.buf.len


def crc32c(bytes data not None, uint32_t crc=0, bint plain=False) -> int:
    """CRC-32C of ``data``, after ``crc``; ``plain``: without the processor's instruction for it."""
    if plain:
        return art_crc32c_plain(crc, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))
    return art_crc32c(crc, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data))


#: What pages of a frame are, by number.
PAGE_KINDS = ("zero", "image", "base", "whole", "image_patch", "base_patch")
