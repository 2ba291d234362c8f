"""YAML as recipes and cluster files are read: safe, and no key twice."""

from __future__ import annotations

from typing import Any

import yaml


class StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice: one of the two would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping, each of its keys once."""
        names = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        seen: list[Any] = []
        for name in names:
            key = self.construct_object(name, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"{key!r} is given twice", problem_mark=name.start_mark)
            seen.append(key)
        return super().construct_mapping(node, deep)
