"""Cards for the words of a check or a prediction, light in every theme, with sign and colour."""

import html
import re
from collections.abc import Mapping

LOOKS = {  # right, wrong or neither: the sign, its ink, the ground
    True: ("✓", "#006B4F", "#EDF8F3"),
    False: ("✗", "#B00020", "#FDF0F1"),
    None: ("·", "#555555", "#F5F5F5"),
}
NONE: dict[str, str] = {}
CODE = "font-family: monospace; font-size: 13px; white-space: pre-wrap; line-height: 1.4"


def card(passed: bool | None, title: str, *said: str, folds: Mapping[str, str] = NONE) -> str:
    """Make a card in HTML. said: paragraphs, `code` in backticks, those of several lines verbatim.

    folds: {text to click on: text that then unfolds}.
    """
    sign, ink, ground = LOOKS[passed]
    style = f"background: {ground}; border: 1px solid {ink}; border-left-width: 8px"
    style += "; border-radius: 6px; padding: 8px 14px; margin: 4px 0; max-width: 100ex; color: #111"
    style += "; font-family: sans-serif; font-size: 15px; line-height: 1.45"
    head = f'<b style="color: {ink}; font-size: 16px">{sign} {marked(title)}</b>'
    parts = [head, *map(_paragraph, filter(None, said))]
    for name, text in folds.items():
        summary = f'<summary style="cursor: pointer">{html.escape(name)}</summary>'
        parts.append(f'<details style="margin-top: 6px">{summary}{_paragraph(text)}</details>')
    return f'<div style="{style}">{"".join(parts)}</div>'


def _paragraph(text: str) -> str:
    if "\n" in text:
        return f'<div style="{CODE}; margin: 6px 0">{html.escape(text)}</div>'
    word = re.match("[a-z]{2,} (?!=)", text)  # and not code, such as `pair = …`
    text = text[:1].upper() + text[1:] if word else text
    return f'<div style="margin: 6px 0">{marked(text)}</div>'


def marked(text: str) -> str:
    """Turn a line, `code` in backticks, into HTML."""
    code = rf'<code style="background: none; color: inherit; {CODE}">\1</code>'
    return re.sub("`([^`]+)`", code, html.escape(text))
