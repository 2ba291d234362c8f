"""What can be trained on, and what cannot."""

from __future__ import annotations

import pytest

from freescale.data.source import check_source
from freescale.errors import DataError
from tests.list_source import ListSource


def test_data_sets_that_cannot_be_trained_on_are_refused():
    with pytest.raises(DataError, match="no histories"):
        check_source(ListSource([]))
    with pytest.raises(DataError, match="longest history: 3 events"):
        check_source(ListSource([[1], [1, 2, 3]]))
    check_source(ListSource([[1], [1, 2, 3, 4]]))
