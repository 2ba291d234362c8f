"""What an id map tells about itself."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from freescale.embedding.ids.id_stats import histogram

# Any size, and the ends of the ranges, which a logarithm in floating point gets wrong.
NUMBERS = st.one_of(
    st.integers(0, 40),
    st.integers(0, 2**63 - 1),
    st.builds(lambda power, by: max(0, 2**power - by), st.integers(0, 62), st.integers(0, 1)),
)


@given(st.lists(NUMBERS, max_size=50))
def test_a_number_is_counted_in_the_range_that_has_it(numbers: list[int]) -> None:
    counted = histogram(torch.tensor(numbers, dtype=torch.int64))
    truth = Counter(number.bit_length() for number in numbers)
    assert sum(counted.values()) == len(numbers)
    for name, count in counted.items():
        low, high = int(name.split("-")[0]), int(name.split("-")[-1])
        assert low.bit_length() == high.bit_length()
        assert count == sum(low <= number <= high for number in numbers) == truth[low.bit_length()]
