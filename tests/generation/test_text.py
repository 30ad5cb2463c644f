"""The text stream: for any split of the bytes, the text is the same and no stop string leaks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slm_core.generation import TextStream

pieces = st.lists(st.binary(max_size=5), max_size=12)
stops = st.lists(st.text("ab<|é", min_size=1, max_size=4), max_size=3)


def run(chunks: list[bytes], stop: list[str]) -> tuple[str, bool, list[str]]:
    stream, shown = TextStream(stop), []
    for chunk in chunks:
        text, stopped = stream.feed(chunk)
        shown.append(text)
        if stopped:
            return "".join(shown), True, shown
    text, stopped = stream.flush()
    return "".join([*shown, text]), stopped, shown


@given(pieces, stops)
def test_the_text_ends_before_the_first_stop_string(chunks: list[bytes], stop: list[str]) -> None:
    whole = b"".join(chunks).decode("utf-8", "replace")
    starts = [at for at in (whole.find(text) for text in stop) if at >= 0]
    text, stopped, _ = run(chunks, stop)
    # A stop string that completes earlier wins over another that begins earlier but completes later.
    ends = min((whole.find(s) + len(s) for s in stop if s in whole), default=None)
    assert stopped == bool(starts)
    if ends is None:
        assert text == whole
    else:
        assert whole.startswith(text)
        assert not any(s in text for s in stop), f"{text!r} contains a stop string of {stop}"


@given(st.text("ab<|é語", max_size=20), st.lists(st.text("ab<|", min_size=1, max_size=3), max_size=3))
def test_the_result_does_not_depend_on_the_split(text: str, stop: list[str]) -> None:
    data = text.encode()
    by_byte = run([data[i : i + 1] for i in range(len(data))], stop)
    by_two = run([data[i : i + 2] for i in range(0, len(data), 2)], stop)
    assert by_byte[:2] == by_two[:2] == run([data], stop)[:2]


def test_the_first_complete_stop_string_of_a_piece_ends_the_text() -> None:
    for stop in (["abcd", "bc"], ["bc", "abcd"], ["d", "bc"]):
        assert run([b"xabcd"], stop)[:2] == ("xa", True)
    assert run([b"xabc"], ["bc", "abc"])[:2] == ("x", True), "of two that are complete together, the longer one"


def test_no_piece_splits_a_character() -> None:
    data = "né語🙂x".encode()
    stream, shown = TextStream(), []
    for i in range(len(data)):
        shown.append(stream.feed(data[i : i + 1])[0])
    assert [s for s in shown if s] == ["n", "é", "語", "🙂", "x"]


def test_an_incomplete_character_at_the_end_becomes_one_replacement() -> None:
    stream = TextStream()
    assert stream.feed("é".encode()[:1]) == ("", False)
    assert stream.pending == b"\xc3"
    assert stream.flush() == ("�", False)


def test_a_possible_stop_string_is_held_until_it_is_decided() -> None:
    stream = TextStream(["STOP"])
    assert stream.feed(b"a ST") == ("a ", False)
    assert stream.held == "ST"
    assert stream.feed(b"ART") == ("START", False)
    assert stream.feed(b"STOPx") == ("", True)


def test_a_stream_continues_from_pending_bytes_and_held_text() -> None:
    first = TextStream(["END"])
    first.feed(b"xE")
    first.feed("語".encode()[:2])
    # The held text was emitted: the incomplete character cannot be part of a stop string, but it is not known yet.
    twin = TextStream(["END"], first.pending, first.held)
    assert twin.feed("語".encode()[2:]) == first.feed("語".encode()[2:])


def test_the_end_of_the_stream_may_complete_a_stop_string() -> None:
    stream = TextStream(("\ufffd",))
    assert stream.feed(b"a" + "é".encode()[:1]) == ("a", False)
    assert stream.flush() == ("", True)
    assert stream.stop == "\ufffd"
