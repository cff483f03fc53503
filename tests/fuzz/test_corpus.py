"""Every input of every corpus once more: what a fuzzer has found stays found, without a fuzzer."""

import hashlib

import msgspec
import pytest

from . import kit
from .targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_corpus(name: str) -> None:
    inputs = sorted((kit.CORPUS / name).iterdir())
    assert inputs, "a target without seeds finds little in a minute"
    for path in inputs:
        try:
            TARGETS[name].run(path.read_bytes())
        except Exception as error:
            error.add_note(f"input: {path}")
            raise


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_and_nesting_that_no_stack_holds(name: str) -> None:
    for data in (b"", *(kit.deepen(b"", TARGETS[name].codec, 1 << 16, seed) for seed in range(4))):
        TARGETS[name].run(data)


def test_every_corpus_has_a_target() -> None:
    assert {path.name for path in kit.CORPUS.iterdir()} == set(TARGETS)


def test_the_mutator_changes_values() -> None:
    given = [1, "two", b"three", [4, {"five": 6}]]
    made = {kit.mutate(msgspec.msgpack.encode(given), kit.MSGPACK, 1 << 16, seed) for seed in range(300)} - {None}
    assert len(made) > 100
    for data in made:
        assert data is not None
        msgspec.msgpack.decode(data)
    assert kit.mutate(b"\xc1", kit.MSGPACK, 100, 1) is None
    assert len({hashlib.sha256(data or b"").digest() for data in made}) == len(made)
