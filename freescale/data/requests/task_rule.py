"""TaskRule: what a ranking model predicts of a candidate, in one line of a recipe.

click = action > 0                           binary: a comparison
share = flags & 4                            binary: a bit, or any of several
rating = number action where click           a number, learnt and judged only where another task is true
watched = number seconds log weight 0.2      ln(1 + number), and its weight among the tasks
price = number paid huber 2.5                squared up to an error of 2.5, linear beyond
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from freescale.errors import ConfigError

_LINE = re.compile(
    r"\s*([A-Za-z_]\w*)\s*=\s*(number\s+)?([A-Za-z_]\w*)\s*(?:(>=|<=|>|<|==|&)\s*(\S+))?(.*)", re.S
)
_WORDS = re.compile(r"\s*(?:(where)\s+([A-Za-z_]\w*)|(weight|huber)\s+(\S+)|(log))\b\s*")
_COMPARE: dict[str, Any] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
}
_FORM = (
    "NAME = COLUMN > NUMBER, NAME = COLUMN & BITS or NAME = number COLUMN; "
    "then where NAME, weight NUMBER, log, huber NUMBER"
)


@dataclass(frozen=True, kw_only=True)
class TaskRule:
    """One task.

    Args:
        name: what its metrics are called.
        kind: "binary" or "number".
        column: the outcome it is made of.
        compare: >, >=, <, <=, == or & (bits); None for numbers.
        value: what the column is compared with.
        where: a binary task that must be true for a candidate to count; None: all count.
        weight: factor of its loss.
        log: the number is ln(1 + x).
        huber: error from which on the loss is linear; None: squared.
    """

    name: str
    kind: Literal["binary", "number"]
    column: str
    compare: str | None = None
    value: float = 0.0
    where: str | None = None
    weight: float = 1.0
    log: bool = False
    huber: float | None = None

    def of(self, values: Any) -> Any:
        """Labels from the values of the column, as numbers of the same kind of array; NaN where there is none."""
        if self.kind == "number":
            return values.log1p() if self.log else values
        missing = values != values
        if self.compare == "&":
            true = (values.masked_fill(missing, 0).long() & int(self.value)) != 0
        else:
            assert self.compare is not None
            true = _COMPARE[self.compare](values, self.value)
        return true.to(values.dtype).masked_fill(missing, math.nan)

    def __str__(self) -> str:
        how = f"{self.column} {self.compare} {self.value:g}" if self.compare else f"number {self.column}"
        more = [f" where {self.where}" if self.where else "", " log" if self.log else ""]
        more += [f" huber {self.huber:g}" if self.huber is not None else ""]
        more += [f" weight {self.weight:g}" if self.weight != 1 else ""]
        return f"{self.name} = {how}{''.join(more)}"


def parse_tasks(lines: Sequence[str]) -> tuple[TaskRule, ...]:
    """The tasks of a recipe.

    Raises:
        ConfigError: a line is not a task, or names one that is not there.
    """
    rules = tuple(_parse(line) for line in lines)
    names = [rule.name for rule in rules]
    if not rules:
        raise ConfigError("head.tasks: a head needs at least one task", allowed=_FORM)
    for rule in rules:
        if names.count(rule.name) > 1:
            raise ConfigError(f"head.tasks: two tasks are called {rule.name!r}")
        if rule.where is None:
            continue
        found = next((other for other in rules if other.name == rule.where), None)
        if found is None or found.kind != "binary" or found.where is not None:
            raise ConfigError(
                f"head.tasks: {rule.name} counts only where {rule.where!r} is true, which is no such task",
                allowed=", ".join(each.name for each in rules if each.kind == "binary" and not each.where)
                or "a binary task without a condition",
            )
    return rules


def _parse(line: str) -> TaskRule:
    found = _LINE.fullmatch(line)
    if found is None or bool(found[2]) == bool(found[4]):
        raise ConfigError("head.tasks: this is no task", got=repr(line), allowed=_FORM)
    options: dict[str, Any] = {
        "name": found[1],
        "kind": "number" if found[2] else "binary",
        "column": found[3],
    }
    try:
        if found[4]:
            value = float(found[5])
            options |= {"compare": found[4], "value": value}
            if found[4] == "&" and (value != int(value) or value <= 0):
                raise ValueError
        rest = found[6]
        while rest.strip():
            word = _WORDS.match(rest)
            if word is None:
                raise ValueError
            given = {"where": word[2]} if word[1] else {word[3]: float(word[4])} if word[3] else {"log": True}
            options, rest = options | given, rest[word.end() :]
        weight, huber = options.get("weight", 1.0), options.get("huber", 1.0)
        if not (weight >= 0 and math.isfinite(weight) and huber > 0):
            raise ValueError
    except ValueError:
        raise ConfigError("head.tasks: this is no task", got=repr(line), allowed=_FORM) from None
    if options["kind"] == "binary" and ("log" in options or "huber" in options):
        raise ConfigError("head.tasks: log and huber are for numbers", got=repr(line))
    return TaskRule(**options)
