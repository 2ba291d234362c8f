"""Raw files as they come, what is odd about each, and what must become of it. `python -m tests.data.messy_cases`
writes the table of docs/data.md again.

Nearly all hold the same six events. Text lies in `messy/`; what cannot be committed as text is made by `messy_files`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freescale.data.preparing.preparation import ColumnNames

TABLE_START, TABLE_END = (
    "<!-- messy files: written by tests/data/messy_cases.py -->",
    "<!-- end of messy files -->",
)
DOCS = Path(__file__).parents[2] / "docs" / "data.md"

START = 1_700_000_000
# User -> (item, seconds behind START, action) in the order of time; those of user 7 tie at 100.
Histories = dict[Any, list[tuple[Any, int | None, float | None]]]
BASE: Histories = {3: [(30, 40, 5), (20, 50, 4), (10, 60, 2)], 7: [(30, 90, 3), (10, 100, 5), (40, 100, 1)]}
IN_FILE_ORDER: Histories = {
    3: [(20, None, 4), (10, None, 2), (30, None, 5)],
    7: [(10, None, 5), (30, None, 3), (40, None, 1)],
}


@dataclass(frozen=True)
class Case:
    """One input.

    Args:
        file: in `messy/`, or a name of `messy_files`.
        odd: what is odd about it, in words for the table.
        command: options as they are typed, for the table.
        options: the same for `prepare`.
        events: what is read; None where it is refused.
        said: what the summary must say, or the message of the refusal, as a regular expression.
        skipped: lines that are left out.
    """

    file: str
    odd: str
    command: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    events: Histories | None = None
    said: str = ""
    skipped: int = 0

    @property
    def name(self) -> str:
        """Of the test."""
        return f"{self.file} {self.command}".strip()


def changed(
    user: Callable[[Any], Any] = lambda u: u,
    item: Callable[[Any], Any] = lambda i: i,
    action: Callable[[float], float | None] = lambda a: a,
) -> Histories:
    """The usual events with other ids or actions."""
    return {
        user(u): [(item(i), t, None if a is None else action(a)) for i, t, a in history]
        for u, history in BASE.items()
    }


def at(times: dict[int, list[int]]) -> Histories:
    """The usual events, by item and user, at other times."""
    return {u: [(i, t, a) for (i, _, a), t in zip(history, times[u])] for u, history in BASE.items()}


def columns(**names: str) -> dict[str, Any]:
    return {"columns": ColumnNames(**names)}


UUIDS = {7: "5f0c1b1e-8d0a-4a57-9d3b-0d3c0f6f2a11", 3: "0a6e2b7c-3c52-4e0e-8f53-8f6b8a0c9d22"}
ASINS = {10: "0439893577", 20: "B00005N7P0", 30: "B000FBJ9JY", 40: "0000031852"}
NAMES, WORDS = {7: "Zoë", 3: "李雷"}, {10: "café, noir", 20: "мир", 30: "🎈", 40: "x y"}
DAY = 86400
MIDNIGHT = -22 * 3600 - 13 * 60 - 20  # of START's day
DAYS: Histories = {
    3: [(30, MIDNIGHT, 5), (20, MIDNIGHT + DAY, 4), (10, MIDNIGHT + 2 * DAY, 2)],
    7: [(30, MIDNIGHT, 3), (10, MIDNIGHT + 2 * DAY, 5), (40, MIDNIGHT + 3 * DAY, 1)],
}
FOUR = ("user", "item", "action", "time")
LISTED = {"user": "user_id", "item": "items", "action": "ratings"}
FREQUENT = {5: 0, 4: 0, 2: 0, 3: 1, 1: 2}  # view, view, view, cart, purchase

SKIP = {"bad_lines": "skip"}
UNTIMED = {"item": "items", "action": "ratings"}

CASES = [
    # Dialects of CSV
    Case("byte_order_mark.csv", "a byte order mark", events=BASE),
    Case("crlf.csv", "lines end in `\\r\\n`", events=BASE),
    Case("semicolons.csv", "semicolons, names and numbers in quotes", events=BASE),
    Case("bars.psv", "bars", events=BASE),
    Case("tabs.tsv", "tabs", events=BASE),
    Case("control_a.csv", "Hive's control-A", events=BASE),
    Case("tildes.csv", "tildes", events=BASE),
    Case("double_colons.csv", "double colons below a header", events=BASE),
    Case("double_bars.csv", "double bars", events=BASE),
    Case("double_bars.csv", "the same", "--separator '||'", {"separator": "||"}, BASE),
    Case("quoted.csv", "separators, quotes and line ends in quotes", events=BASE, said="ignored: note"),
    Case("blank_lines.csv", "blank lines, also before the header", events=BASE),
    Case("no_last_newline.csv", "the last line has no end", events=BASE),
    Case("padded.csv", "blanks around names and values", events=BASE),
    Case("sep_line.csv", "Excel's `sep=;` as first line", said="first line is a note to Excel.*tail -n"),
    Case("open_quote.csv", "a quote that is never closed", said="line 8: a quote is never closed.*close it"),
    Case("inch.csv", "a quote inside a field", events=BASE),
    Case("carriage_returns.csv", "lines end in `\\r` alone", said="carriage returns alone.*tr "),
    Case("empty.csv", "nothing in it", said="is empty.*check the path"),
    Case("header_only.csv", "nothing but a header", said="no events.*check the path"),
    # Names of columns
    Case("other_names.csv", "names nobody can guess", said="for the user and.*for the item.*--user.*--item"),
    Case(
        "other_names.csv",
        "the same, named",
        "--user customer --item sku --action stars",
        columns(user="customer", item="sku", action="stars"),
        BASE,
        "user: customer",
    ),
    Case("two_items.csv", "two columns of one name", said="several columns named 'item_id'.*name of its own"),
    Case("headerless.csv", "no header", said="names no columns.*--columns user,item"),
    Case("headerless.csv", "the same, named", "--columns user,item,action,time", {"header": FOUR}, BASE),
    Case(
        "headerless.csv",
        "the same, actions ignored",
        "--columns user,item,_,time",
        {"header": ("user", "item", "_", "time")},
        changed(action=lambda a: None),
    ),
    Case(
        "headerless.csv",
        "too few names",
        "--columns user,item",
        {"header": FOUR[:2]},
        said="names 2 fields.*has 4",
    ),
    Case(
        "headerless_tabs.data", "no header, tabs", "--columns user,item,action,time", {"header": FOUR}, BASE
    ),
    Case(
        "headerless_blanks.txt",
        "no header, blanks",
        "--columns user,item,action,time",
        {"header": FOUR},
        BASE,
    ),
    Case(
        "crlf.csv",
        "a header after all",
        "--columns user,item,action,time",
        {"header": FOUR},
        said="has a header.*leave `--columns` out",
    ),
    # Times nobody uses
    Case("created_at.csv", "a time column of another name", said="looks like time.*created_at.*--time ''"),
    Case(
        "created_at.csv",
        "the same, named",
        "--time created_at",
        columns(time="created_at"),
        BASE,
        "dates; from",
    ),
    Case("created_at.csv", "the same, left out", "--time ''", columns(time=""), IN_FILE_ORDER, "time: none"),
    Case("time_by_values.csv", "a column `c4` of dates", said="looks like time.*'c4'.*--time c4"),
    Case("epoch_by_values.csv", "a column `c4` of milliseconds", said="looks like time.*'c4'"),
    Case("watch_time.csv", "`watch_time` is a duration", events=IN_FILE_ORDER, said="ignored: watch_time"),
    # Units of time, dates and zones
    Case("milliseconds.csv", "milliseconds", events=BASE, said="milliseconds since 1970, by their size"),
    Case("microseconds.csv", "microseconds", events=BASE, said="microseconds since 1970"),
    Case("nanoseconds.csv", "nanoseconds, two in one second", events=BASE, said="nanoseconds since 1970"),
    Case(
        "mixed_units.csv",
        "milliseconds among seconds",
        said="line 5: the time.*seconds since 1970, as the others",
    ),
    Case(
        "fractions.csv",
        "fractions of a second",
        events={3: BASE[3], 7: [(30, 90, 3), (40, 100, 1), (10, 100, 5)]},
    ),
    Case("time_zones.csv", "ISO dates, six ways, five zones", events=BASE, said="without a time zone in UTC"),
    Case("minutes.csv", "`2023-11-14 22:14`", events=at({3: [-20, 40, 100], 7: [40, 160, 160]})),
    Case("days.csv", "days alone, in `date`", "--time date", columns(time="date"), DAYS),
    Case("day_digits.csv", "`20231114`", events=DAYS, said="dates of 8 digits"),
    Case("second_digits.csv", "`20231114221500`", events=BASE, said="dates of 14 digits"),
    Case("slashes.csv", "`2023/11/14 22:15:00`", events=BASE),
    Case("german_dates.csv", "`14.11.2023 22:15`", said="line 2: the time.*ISO dates"),
    Case("american_dates.csv", "`11/14/2023`", said="line 2: the time.*ISO dates"),
    Case("february_30.csv", "a day that is none", said="line 6: the time.*2024-02-30.*--bad-lines skip"),
    # Actions
    Case(
        "words.csv",
        "actions in words",
        events=changed(action=FREQUENT.__getitem__),
        said="view 0, cart 1, purchase 2",
    ),
    Case(
        "words.csv",
        "the same, numbered",
        "--actions view=1,cart=3,purchase=10",
        {"actions": {"view": 1, "cart": 3, "purchase": 10}},
        changed(action=lambda a: {0: 1, 1: 3, 2: 10}[FREQUENT[int(a)]]),
        "as asked for",
    ),
    Case(
        "words.csv",
        "a word unnamed",
        "--actions view,cart",
        {"actions": ["view", "cart"]},
        said="'purchase'.*view, cart",
    ),
    Case(
        "true_false.csv", "`True` and `False`", events=changed(action=lambda a: a > 3), said="true 1, false 0"
    ),
    Case("zero_one.csv", "0 and 1", events=changed(action=lambda a: a > 3)),
    Case("decimal_comma.csv", "`4,5` for 4.5", said="line 2: the action.*'5,5'.*--bad-lines skip"),
    # Lines that cannot be used
    Case("empty_cells.csv", "empty cells", said="line 4: the item is missing.*--bad-lines skip"),
    Case(
        "empty_cells.csv",
        "the same, skipped",
        "--bad-lines skip",
        SKIP,
        BASE,
        "skipped 2 bad lines",
        2,
    ),
    Case("null_words.csv", "`NULL` and `\\N` for nothing", said=r"line 8: the user is missing.*'NULL'"),
    Case(
        "null_words.csv",
        "the same, skipped",
        "--bad-lines skip",
        SKIP,
        BASE,
        r"line 9.*\\N",
        2,
    ),
    Case("short_lines.csv", "lines with fields missing, or too many", said="line 8: wrong number of fields"),
    Case(
        "short_lines.csv",
        "the same, skipped",
        "--bad-lines skip",
        SKIP,
        BASE,
        "line 9: wrong",
        2,
    ),
    # Ids
    Case(
        "uuids_and_asins.csv",
        "UUIDs; ASINs, some of digits with zeros in front",
        events=changed(user=UUIDS.__getitem__, item=ASINS.__getitem__),
        said="item ids are text",
    ),
    Case("unicode.csv", "ids in any script", events=changed(user=NAMES.__getitem__, item=WORDS.__getitem__)),
    Case("negative.csv", "negative ids", events=changed(user=lambda u: -u, item=lambda i: -i)),
    Case(
        "unsigned.csv",
        "unsigned 64-bit ids",
        events=changed(user=lambda u: 2**63 + u, item=lambda i: 2**64 - i),
    ),
    Case("floats.csv", "`12.0` for 12", events=BASE),
    Case("latin1.csv", "ids in Latin-1", said="line 2: the user is not UTF-8.*iconv"),
    Case("latin1_elsewhere.csv", "Latin-1 in a column nobody uses", events=BASE, said="ignored: title"),
    # JSON lines
    Case("events.jsonl", "JSON lines", events=BASE, said="ignored: tags"),
    Case(
        "nested.jsonl",
        "objects in objects",
        "--user user.id --item item.id",
        columns(user="user.id", item="item.id"),
        BASE,
    ),
    Case("mixed_types.jsonl", '`7` and `"7"`, `5` and `5.0`', events=BASE),
    Case(
        "large_ids.jsonl",
        "ids beyond 2^53 and 2^63",
        events=changed(lambda u: 2**60 + u, lambda i: 2**64 - i),
    ),
    Case(
        "lists.jsonl",
        "a user a line, times unused",
        "--item items",
        columns(**UNTIMED),
        said="'timestamps'.*--time timestamps",
    ),
    Case(
        "lists.jsonl",
        "the same, named",
        "--item items --time timestamps",
        columns(time="timestamps", **LISTED),
        BASE,
    ),
    Case(
        "broken.jsonl",
        "a line that is no JSON, one without item",
        said="line 7: not a JSON object.*--bad-lines skip",
    ),
    Case(
        "broken.jsonl",
        "the same, skipped",
        "--bad-lines skip",
        SKIP,
        BASE,
        "line 8: the item is missing",
        2,
    ),
    Case("array.json", "one JSON array", said="one JSON array.*jq -c"),
    Case("python_objects.json", "Python objects, not JSON", said="no column|not a JSON object"),
    Case("events.jsonl.gz", "JSON lines in gzip", events=BASE),
    Case("events.jsonl.zst", "JSON lines in zstd", events=BASE),
    # Other encodings and files
    Case("utf16.csv", "UTF-16", said="UTF-16.*iconv -f UTF-16"),
    Case(
        "utf16_without_mark.csv", "UTF-16 without its mark", said="UTF-16 without its mark.*iconv -f UTF-16LE"
    ),
    Case("gzip_without_ending.csv", "gzip that is not called so", said="packed by gzip.*\\.gz"),
    Case("workbook.csv", "an Excel workbook called CSV", said="Excel workbook.*CSV"),
    Case("pickled.csv", "a pickle", said="pickle.*Parquet"),
    # Parquet
    Case("zoned.parquet", "microseconds in Europe/Berlin", events=BASE, said="timestamp \\(dates; from"),
    Case("local.parquet", "nanoseconds without a zone", events=BASE, said="without a time zone in UTC"),
    Case("millis.parquet", "milliseconds as numbers", events=BASE, said="milliseconds since 1970"),
    Case("days.parquet", "dates", "--time date", columns(time="date"), DAYS),
    Case("texts.parquet", "everything is text, some of it dictionaries", events=BASE),
    Case("clock.parquet", "times of day without a day", said="row 0: the time"),
    Case(
        "lists.parquet",
        "a user a row, times unused",
        "--item items",
        columns(**UNTIMED),
        said="'timestamps'",
    ),
    Case(
        "lists.parquet",
        "the same, named",
        "--item items --time timestamps",
        columns(time="timestamps", **LISTED),
        BASE,
    ),
    Case("nulls.parquet", "a null item", said="row 6: the item is missing"),
    Case("nulls.parquet", "the same, skipped", "--bad-lines skip", SKIP, BASE, "row 6", 1),
    # Folders
    Case("hive", "`dt=2023-11-14/part-0.parquet`", said="looks like time.*'dt'.*--time dt"),
    Case("hive", "the same, named", "--time dt", columns(time="dt"), DAYS, "time: dt"),
    Case("hive_csv", "CSV in folders, the user in their names", "", {}, BASE, "user: user_id"),
    Case("two_formats", "CSV beside Parquet", said="files of several formats.*--format"),
    Case(
        "two_formats", "the same, named", "--format csv", {"format": "csv"}, BASE, "files not read: x.parquet"
    ),
]


def table() -> str:
    """The table of docs/data.md."""
    lines = ["| file | what is odd | options | |", "|---|---|---|---|"]
    for case in CASES:
        what = "refused" if case.events is None else "read"
        if case.skipped:
            what = (
                f"read, {case.skipped} told and skipped" if case.skipped > 1 else "read, 1 told and skipped"
            )
        command = f"`{case.command}`".replace("|", "\\|") if case.command else ""
        lines.append(f"| `{case.file}` | {case.odd} | {command} | {what} |")
    return "\n".join(lines)


def documented() -> str:
    """The table that docs/data.md has."""
    return DOCS.read_text(encoding="utf-8").partition(TABLE_START)[2].partition(TABLE_END)[0].strip()


def write_docs() -> None:
    """Put the table into docs/data.md."""
    before, start, rest = DOCS.read_text(encoding="utf-8").partition(TABLE_START)
    _, end, after = rest.partition(TABLE_END)
    DOCS.write_text(f"{before}{start}\n\n{table()}\n\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_docs()
