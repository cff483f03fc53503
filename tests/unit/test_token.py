"""Resume tokens as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrt.engine.token import ResumeToken, parse_token
from agentrt.errors import InputError
from agentrt.ids import run_id_from_bytes

tokens = st.builds(
    ResumeToken,
    st.binary(min_size=16, max_size=16).map(run_id_from_bytes),
    st.integers(1, 10**18),
    st.integers(1, 10**18),
    st.none() | st.from_regex(r"[A-Za-z0-9_.\-]{2,128}", fullmatch=True),
    st.integers(0, 10**18),
    st.integers(0, 3),
)


@given(token=tokens)
def test_a_token_is_read_as_it_was_written(token: ResumeToken) -> None:
    assert parse_token(str(token)) == token


@given(token=tokens, data=st.data())
def test_what_is_read_is_written_the_same_or_is_refused(token: ResumeToken, data: st.DataObject) -> None:
    text = str(token)
    at = data.draw(st.integers(0, len(text)))
    changed = text[:at] + data.draw(st.text(max_size=2)) + text[at + data.draw(st.integers(0, 2)) :]
    try:
        found = parse_token(changed)
    except InputError as error:
        assert len(str(error)) < 400
    else:
        assert str(found) == changed


@pytest.mark.parametrize("text", ["", "/", "run_/1/1/-/0/0", "run_01HF7YAT00F6V07VG0QK2ZZZZZ/01/1/-/0/0", None, 7])
def test_what_is_no_token_is_refused(text: object) -> None:
    with pytest.raises(InputError):
        parse_token(text)  # type: ignore[arg-type]
