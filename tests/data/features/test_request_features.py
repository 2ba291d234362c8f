"""What a request says becomes what a batch of the same events holds, whatever the data."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from freescale.data import (
    BatchFeatures,
    Examples,
    FeatureRequest,
    ParquetSource,
    RequestFeatures,
    ServedItems,
    prepare,
    served_schema,
    table_kinds,
)
from tests.data.feature_reference import id_of, sorted_histories
from tests.data.test_features import SCHEMA, as_text, inputs, write_rows
from tests.effort import examples

TOKENS = [name for name, words in SCHEMA.items() if words.get("of") != "item"]
SAID = {"long": "watched"}
MOST = 5


@examples(8, 200)
@given(inputs(), st.lists(st.sampled_from(TOKENS), min_size=1, unique=True))
def test_requests_become_what_batches_hold(given: dict[str, Any], tokens: list[str]) -> None:
    histories = sorted_histories(given["events"], 3)
    if not histories:
        return
    with tempfile.TemporaryDirectory() as folder:
        files = {name: write_rows(Path(folder) / name, given[name], "jsonl") for name in ("items", "users")}
        events = write_rows(Path(folder) / "events", given["events"], given["formats"]["events"])
        prepare(events, Path(folder) / "out", schema=SCHEMA, **files)
        source = ParquetSource(Path(folder) / "out")
        whole = BatchFeatures(source, source.schema)
        wanted = Examples(source=source, split="test", max_length=MOST, features=whole)
        rows = np.arange(len(source))
        batch = wanted.batch(rows)
        users = source.read(rows).users.tolist()
        schema = served_schema(source.schema, tokens)
        members = [each.name for each in schema.stored("item")]
        everything = np.arange(len(source.items.ids))
        served = ServedItems(
            source.items.ids,
            schema=schema,
            statistics=source.statistics,
            columns=source.item_features().take(everything, members),
        )
        kinds = table_kinds(source)
    reader = RequestFeatures(served, tokens, kinds)
    text = as_text(given)["user"]
    by_id = {id_of(name, text=text): name for name in histories}
    about = {each["user"]: each for each in given["users"]}
    requests = []
    for user in users:
        name = by_id[user]
        known = histories[name][:-1]
        said: dict[str, Any] = {}
        for feature in reader.needed.values():
            column = SAID.get(feature.name, feature.name)
            of_event = feature.of == "event"
            said[feature.name] = [event[column] for event in known] if of_event else about[name][column]
        kept = np.arange(len(known))[-MOST:]
        requests.append(FeatureRequest(said, len(known), kept))
        reader.check(requests[-1])
    events_made, users_made, fronts = reader.read(requests, batch.tokens["item"].numpy())
    assert fronts == {}  # nobody asked for candidates
    assert {name.split(".")[0] for name in (*events_made, *users_made)} >= set(tokens)
    for made, there in ((events_made, batch.tokens), (users_made, batch.samples)):
        for name, values in made.items():
            expected = there[name].numpy()
            if expected.ndim > 1:  # lists are as wide as the longest of all histories, or of these
                expected, values = (
                    np.sort(each, axis=1)[:, -values.shape[1] :] for each in (expected, values)
                )
            np.testing.assert_array_equal(values, expected, err_msg=name)
