"""How a model is judged, in words and as facts: every line of metrics names it, and two runs are compared by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freescale import units
from freescale.data import RepeatShare, Split
from freescale.train.quality.full_ranking import Rule


@dataclass(frozen=True, kw_only=True)
class EvalProtocol:
    """How a model is judged.

    Args:
        rule: among what targets are ranked; None: nothing is ranked, a head judges itself.
        num_items: of the catalogue.
        users: how many users each split has a target of.
        split: name of the split and what makes it the same, see `SplitSource`.
        split_words: the split, for people.
        missed: how many users of each split have a target that is no item of the catalogue.
        repeats: how many training targets repeat an earlier item; None: not measured.
        max_users: of the evaluations during training; None: all.
        labels: what a head that judges itself predicts, in words.
        judged: what `users` and `max_users` count: "users", or "requests", of which a user may have several.
    """

    rule: Rule | None
    num_items: int
    users: Mapping[Split, int]
    split: Mapping[str, object] = field(default_factory=lambda: {"split": "leave_one_out"})
    split_words: str = "leave-one-out"
    missed: Mapping[Split, int] = field(default_factory=dict)
    repeats: RepeatShare | None = None
    max_users: int | None = None
    labels: str = "next event's label"
    judged: str = "users"

    def words(self, split: Split) -> str:
        """What a line of metrics says of how they were measured."""
        parts = [self._ranking() if self.rule is not None else self.labels, self.split_words]
        total = self.users[split]
        first = self.max_users if split == "valid" else None
        few = first is not None and first < total
        parts.append(f"first {first:,} of {total:,} {self.judged}" if few else f"{total:,} {self.judged}")
        new = self.missed.get(split, 0)
        if new:
            parts.append(f"new items as targets: {new:,} (misses)")
        return ", ".join(parts)

    def facts(self) -> dict[str, object]:
        """What a checkpoint and an export keep."""
        rule = (
            {} if self.rule is None else {"filter_seen": self.rule.filter_seen, "sampled": self.rule.sampled}
        )
        share = {} if self.repeats is None else {"repeat_share": self.repeats.share}
        return {**self.split, **rule, **share, "num_items": self.num_items, "max_users": self.max_users}

    def seen_facts(self) -> dict[str, object]:
        """What the events of metrics say of seen items."""
        facts = self.facts()
        return {name: facts[name] for name in ("filter_seen", "repeat_share") if name in facts}

    def differences(self, other: Mapping[str, Any] | None) -> list[str]:
        """In what another protocol, by its facts, judges validation targets otherwise; None: one of the first edition.

        That filtered seen items, but spared targets among them.
        """
        mine = self.facts()
        if other is None:
            repeats = self.repeats is not None and self.repeats.repeated > 0
            if self.rule is None or (self.rule.filter_seen and not repeats):
                return []
            return [f"targets seen before spared by the filter there, filter_seen={mine['filter_seen']} now"]
        names = [name for name in mine if name != "repeat_share"]
        return [
            f"{name}: {other.get(name)} there, {mine[name]} now"
            for name in names
            if other.get(name) != mine[name]
        ]

    def seen_words(self, asked: str) -> str:
        """What becomes of seen items and why; `asked` is the key as it was set."""
        if self.rule is None or self.repeats is None:
            return ""
        looked_at = "" if self.repeats.whole else f", of {self.repeats.targets:,} looked at"
        share = (
            f"{units.percent(self.repeats.share)} of the training targets repeat an earlier item{looked_at}"
        )
        return f"{self.kept_words()} (eval.filter_seen={asked}; {share})"

    def kept_words(self) -> str:
        """What becomes of seen items."""
        filters = self.rule is not None and self.rule.filter_seen
        return "filtered, a target seen before is a miss" if filters else "recommended again"

    def warnings(self, *, limit: float) -> list[str]:
        """What to keep in mind when these metrics are compared; `limit` is the share of repeats that matters."""
        found = []
        if self.rule is not None and self.rule.sampled is not None:
            found.append(
                f"metrics rank the target among {self.rule.sampled:,} random items: they are far above those of full "
                "ranking and may put models in another order; eval.protocol=full compares honestly"
            )
        if self.max_users is not None and self.max_users < self.users["valid"]:
            found.append(
                f"evaluations during training see the first {self.max_users:,} of {self.users['valid']:,} "
                f"{self.judged} (eval.max_users); the test sees all"
            )
        share = 0.0 if self.repeats is None else self.repeats.share
        if self.rule is not None and self.rule.filter_seen and share >= limit:
            found.append(
                f"{units.percent(share)} of the training targets repeat an earlier item, and eval.filter_seen=true "
                "counts such targets as misses"
            )
        return found

    def _ranking(self) -> str:
        assert self.rule is not None
        seen = "seen filtered" if self.rule.filter_seen else "seen kept"
        if self.rule.sampled is not None:
            return f"sampled ranking among {self.rule.sampled:,} of {self.num_items:,} items, {seen}"
        return f"full ranking, {seen}, {self.num_items:,} items"
