"""The codec of frames through Python: what comes back, what is left out, and what is refused and why."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrt._core import PAGE_KINDS, Frame, FrameEncoder, FrameImage, crc32c
from agentrt.errors import FrameError, InputError

PAGE = 4096
LIMIT = 1 << 24
MODULE = b"m" * 32
IMAGE = b"i" * 32

_word = st.tuples(st.integers(0, PAGE // 8 - 1), st.binary(min_size=8, max_size=8))
_page = st.one_of(
    st.just(bytes(PAGE)),
    st.integers(1, 255).map(lambda value: bytes([value]) * PAGE),
    st.integers(0, 2**32).map(lambda seed: (seed.to_bytes(8, "little") * (PAGE // 8))[:PAGE]),
)
_memory = st.lists(_page, max_size=6).map(b"".join)
_edits = st.lists(st.tuples(st.integers(0, 5), _word), max_size=12)


def edited(memory: bytes, edits: list[tuple[int, tuple[int, bytes]]], more: bytes = b"") -> bytes:
    """The memory with words changed, and grown by ``more``."""
    out = bytearray(memory + more)
    for page, (word, value) in edits:
        if (page + 1) * PAGE <= len(out):
            at = page * PAGE + word * 8
            out[at : at + 8] = value
    return bytes(out)


def encode(
    memory: bytes, *, frame_id: bytes = b"1" * 16, sections: dict[int, bytes] | None = None,
    image: FrameImage | None = None, base: Frame | None = None, module: bytes = MODULE, engine: str = "50.0.1",
) -> bytes:  # fmt: skip
    encoder = FrameEncoder()
    size = encoder.encode(
        memory, module=module, engine=engine, id=frame_id, segment=2, seq=7, fuel=10**12, clock_ns=5,
        sections=sections or {}, image=image, base=base,
    )  # fmt: skip
    assert size == len(encoder)
    return bytes(memoryview(encoder))


def opened(data: bytes) -> Frame:
    return Frame(data, memory_bytes_max=LIMIT)


@given(_memory, st.dictionaries(st.integers(1, 2**32 - 1), st.binary(max_size=40), max_size=8))
def test_a_frame_says_what_it_was_told(memory: bytes, sections: dict[int, bytes]) -> None:
    frame = opened(encode(memory, sections=sections))
    assert frame.memory() == memory
    assert frame.sections == sections
    assert (frame.module, frame.engine, frame.id) == (MODULE, "50.0.1", b"1" * 16)
    assert (frame.segment, frame.seq, frame.fuel, frame.clock_ns, frame.abi) == (2, 7, 10**12, 5, 1)
    assert (frame.memory_bytes, frame.base_id, frame.image) == (len(memory), None, bytes(32))


@given(_memory, _edits, st.integers(1, 3))
def test_an_image_is_the_same_without_the_zeros_at_its_end(
    initial: bytes, edits: list[tuple[int, tuple[int, bytes]]], zeros: int
) -> None:
    """What guests of a module begin with is kept so (`Module.image`)."""
    whole = FrameImage(IMAGE, initial + bytes(zeros * PAGE))
    cut = FrameImage(IMAGE, initial)
    memory = edited(whole.memory, edits)
    data = encode(memory, image=whole)
    assert encode(memory, image=cut) == data
    assert opened(data).memory(image=whole) == opened(data).memory(image=cut) == memory


def test_a_few_words_beyond_the_image_take_no_page() -> None:
    memory = bytearray(4 * PAGE)
    memory[3 * PAGE + 8] = 1
    data = encode(bytes(memory), image=FrameImage(IMAGE, b"a" * PAGE))
    assert len(data) < PAGE
    assert opened(data).memory(image=FrameImage(IMAGE, b"a" * PAGE)) == memory


@given(_memory, _edits, _edits, _memory, st.booleans())
def test_memory_comes_back_from_image_and_base(
    initial: bytes, before: list[tuple[int, tuple[int, bytes]]], after: list[tuple[int, tuple[int, bytes]]],
    grown: bytes, with_image: bool,
) -> None:  # fmt: skip
    image = FrameImage(IMAGE, initial) if with_image else None
    first = edited(initial, before)
    base = opened(encode(first, image=image))
    assert base.memory(image=image) == first
    second = edited(first, after, grown)
    data = encode(second, frame_id=b"2" * 16, image=image, base=base)
    delta = opened(data)
    assert delta.memory(image=image, base=base) == second
    assert delta.base_id == base.id
    assert base.is_base_of(delta)
    kinds = delta.page_kinds()
    assert len(kinds) == len(second) // PAGE
    assert {name: kinds.count(index) for index, name in enumerate(PAGE_KINDS)} == delta.pages
    for index, kind in enumerate(kinds):  # nothing is stored that need not be
        page = slice(index * PAGE, (index + 1) * PAGE)
        if second[page] == first[page] or (with_image and second[page] == initial[page]) or not any(second[page]):
            assert PAGE_KINDS[kind] in ("zero", "image", "base")


@settings(max_examples=300)
@given(_memory, _edits, st.data())
def test_no_byte_changes_unseen(memory: bytes, edits: list[tuple[int, tuple[int, bytes]]], data: st.DataObject) -> None:
    image = FrameImage(IMAGE, memory)
    whole = encode(edited(memory, edits, b"w" * PAGE), image=image, sections={1: b"abc"})
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        opened(bytes(changed)).memory(image=image)
    with pytest.raises(FrameError):
        opened(whole[:at])


@given(st.binary(max_size=400))
def test_bytes_of_others_are_no_frame(data: bytes) -> None:
    with pytest.raises(FrameError):
        opened(data)
    with pytest.raises(FrameError):
        opened(b"ARTFRAME" + data)


def test_what_is_refused_says_why() -> None:
    """FAULTS: corrupt, truncated, swapped, of another version."""
    image = FrameImage(IMAGE, b"i" * PAGE)
    base = opened(encode(b"a" * PAGE, image=image))
    other = opened(encode(b"b" * PAGE, image=image, frame_id=b"3" * 16))
    delta = opened(encode(b"c" + b"a" * (PAGE - 1), frame_id=b"2" * 16, image=image, base=base))
    with pytest.raises(FrameError, match="base is missing"):
        delta.memory(image=image)
    with pytest.raises(FrameError, match="base is another frame"):
        delta.memory(image=image, base=other)
    with pytest.raises(FrameError, match="image is missing"):
        delta.memory(base=base)
    with pytest.raises(FrameError, match="image is another"):
        delta.memory(image=FrameImage(b"j" * 32, b"j" * PAGE), base=base)
    data = encode(b"a" * PAGE)
    with pytest.raises(FrameError, match="version 2 of the format"):
        opened(data[:8] + b"\2" + data[9:])
    with pytest.raises(FrameError, match=f"{len(data) - 1} of {len(data)} bytes"):
        opened(data[:-1])
    with pytest.raises(FrameError, match=r"limit is 100"):
        Frame(data, memory_bytes_max=100)


def test_what_a_base_may_be() -> None:
    memory = b"a" * PAGE
    base = opened(encode(memory))
    delta = opened(encode(memory, frame_id=b"2" * 16, base=base))
    for wrong in ({"base": delta}, {"base": base, "module": b"x" * 32}, {"base": base, "engine": "50.0.2"}):
        with pytest.raises(InputError):
            encode(memory, frame_id=b"4" * 16, **wrong)  # type: ignore[arg-type]


def test_arguments_of_the_wrong_size() -> None:
    for wrong in (
        {"memory": b"x"}, {"module": b"m"}, {"engine": "5" * 33}, {"frame_id": b""}, {"sections": {0: b""}},
        {"sections": dict.fromkeys(range(1, 66), b"")},
    ):  # fmt: skip
        with pytest.raises(InputError):
            encode(**({"memory": b""} | wrong))  # type: ignore[arg-type]
    for digest in (bytes(32), b"short"):
        with pytest.raises(InputError):
            FrameImage(digest, b"")


def test_an_encoder_keeps_what_somebody_looks_at() -> None:
    encoder = FrameEncoder()

    def again() -> int:
        return encoder.encode(
            bytes(PAGE), module=MODULE, engine="", id=bytes(16), segment=0, seq=0, fuel=0, clock_ns=0, sections={}
        )

    again()
    frame = Frame(encoder, memory_bytes_max=LIMIT)
    with pytest.raises(InputError, match="still being looked at"):
        again()
    with pytest.raises((BufferError, TypeError)):
        memoryview(encoder)[0] = 1  # type: ignore[index]
    assert frame.memory() == bytes(PAGE)
    del frame
    again()


@given(st.binary(max_size=5000), st.integers(0, 5000))
def test_the_processors_crc_is_the_plain_one(data: bytes, cut: int) -> None:
    assert crc32c(data) == crc32c(data, plain=True)
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


def test_a_page_more_than_half_changed_is_whole_and_others_are_patches() -> None:
    first = os.urandom(2 * PAGE)
    base = opened(encode(first))
    second = os.urandom(PAGE) + first[PAGE : 2 * PAGE - 8] + b"12345678"
    data = encode(second, frame_id=b"2" * 16, base=base)
    assert opened(data).pages["whole"] == 1
    assert opened(data).pages["base_patch"] == 1
    assert len(data) < PAGE + 400
