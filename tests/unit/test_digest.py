import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.digest import INTEGER_MAX, canonical_json, canonical_text, digest, request_digest
from agentrt.errors import InputError

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-INTEGER_MAX, INTEGER_MAX)
    | st.floats(-(2.0**52), 2.0**52)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def test_digests_cover_the_bytes_as_sent() -> None:
    assert digest(b'{"a": 1}') != digest(b'{"a":1}')
    assert len(digest(b"")) == 16
    # Fixed for good: they stand in journals.
    assert digest(b"abc").hex() == "cf4ab791c62b8d2b2109c90275287816"


def test_a_request_digest_covers_the_op() -> None:
    assert request_digest("emit", b"{}") != request_digest("log", b"{}")
    assert request_digest("a", b"b{}") != request_digest("ab", b"{}")
    assert request_digest("emit", b"{}") == request_digest("emit", b"{}")


def test_canonical_form_is_rfc_8785() -> None:
    text = '{"\\u20ac":"x","\\r":1,"1":[333333333.33333329,1E30,4.50,2e-3,1e-27],"b":null}'
    assert canonical_text(text.encode()) == (
        '{"\\r":1,"1":[333333333.3333333,1e+30,4.5,0.002,1e-27],"b":null,"€":"x"}'.encode()
    )


@given(values)
def test_spelling_does_not_matter_to_the_canonical_form(value: object) -> None:
    plain = canonical_json(value)
    for spelling in (json.dumps(value), json.dumps(value, indent=3), json.dumps(value, ensure_ascii=False)):
        assert canonical_text(spelling.encode()) == plain
    assert canonical_text(plain) == plain


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        2**53,
        -(2**53),
        10**400,
        {"a": [math.nan]},
        {1: 2},
        b"bytes",
        object(),
        "\ud800",
        {"\udfff": 1},
    ],
)
def test_values_that_are_refused(value: object) -> None:
    with pytest.raises(InputError):
        canonical_json(value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"{}x",
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b"1e400",
        b"9007199254740992",
        b"-9007199254740992",
        b"1" * 5000,
        b'{"a":1,"a":1}',
        b'{"x":{"a":1,"a":2}}',
        b'"\xff"',
        b'"\\ud800"',
        b"[" * 100_000,
    ],
)
def test_texts_that_are_refused(text: bytes) -> None:
    with pytest.raises(InputError):
        canonical_text(text)


def test_the_largest_integers_pass() -> None:
    assert canonical_text(b"[9007199254740991,-9007199254740991]") == b"[9007199254740991,-9007199254740991]"


def test_deep_values_are_refused_not_fatal() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(InputError):
        canonical_json(value)
