"""Raw input quoted in error messages, whatever it holds."""

from __future__ import annotations


def excerpt(text: str | bytes, limit: int = 100) -> str:
    """The beginning of a text, printable and short."""
    if isinstance(text, bytes):
        text = text[: 4 * limit].decode("utf-8", "replace")
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in text[: limit + 1])
    return text if len(text) <= limit else text[:limit] + "..."
