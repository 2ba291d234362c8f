"""Errors in words."""

from __future__ import annotations

import pytest

from freescale.comm.world import in_words
from freescale.errors import in_one_line


def test_an_error_in_one_line_is_its_kind_and_the_beginning_of_its_text() -> None:
    assert in_one_line(KeyError("loss")) == "KeyError: 'loss'"
    assert in_one_line(RuntimeError("out of\n  memory ")) == "RuntimeError: out of memory"
    assert len(in_one_line(RuntimeError("x" * 1000))) < 350
    assert in_words(RuntimeError("out of\n  memory ")) == "RuntimeError: out of\n  memory"


@pytest.mark.parametrize("words", [in_one_line, in_words])
def test_an_error_without_a_text_is_told_by_its_place(words) -> None:
    assert words(AssertionError()) == "AssertionError: "
    with pytest.raises(AssertionError) as caught:
        raise AssertionError
    assert words(caught.value).startswith("AssertionError in tests/test_errors.py:")
