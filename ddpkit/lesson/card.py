"""Cards for the words of a check or a prediction, light in every theme, with sign and colour."""

import html
import re
from collections.abc import Mapping, Sequence

LOOKS = {  # right, wrong, a surprise or none of them: the sign, its ink, the ground
    True: ("✓", "#006B4F", "#EDF8F3"),
    False: ("✗", "#B00020", "#FDF0F1"),
    "surprise": ("≠", "#8A5A00", "#FFF6E0"),
    None: ("·", "#555555", "#F5F5F5"),
}
WIDEST = 960  # pixels of cards, players and charts: JupyterLab has them on a screen of 1400
NONE: dict[str, str] = {}
SANS = "font-family: var(--jp-ui-font-family, sans-serif)"  # JupyterLab's own, where it is
CODE = "font-family: var(--jp-code-font-family, monospace); font-size: 13px; line-height: 1.4"
CODE += "; white-space: pre-wrap"


def frame(look: bool | str | None, inside: str) -> str:
    """Wrap HTML in a card. look: a key of LOOKS, which gives the card its sign and colour."""
    _, ink, ground = LOOKS[look]
    style = f"background: {ground}; border: 1px solid {ink}; border-left-width: 8px"
    style += "; border-radius: 6px; padding: 8px 14px; margin: 4px 0; color: #111"
    style += f"; max-width: {WIDEST}px; box-sizing: border-box"  # as wide as charts
    return f'<div style="{style}; {SANS}; font-size: 15px; line-height: 1.45">{inside}</div>'


def card(passed: bool | None, title: str, *said: str, folds: Mapping[str, str] = NONE) -> str:
    """Make the HTML of a card with a title and paragraphs below it.

    said: the paragraphs; `code` in backticks, those of several lines verbatim. folds: {text to
    click on: text that then unfolds}.
    """
    sign, ink, _ = LOOKS[passed]
    head = f'<b style="color: {ink}; font-size: 16px">{sign} {marked(title)}</b>'
    parts = [head, *map(_paragraph, filter(None, said))]
    for name, text in folds.items():
        summary = f'<summary style="cursor: pointer">{html.escape(name)}</summary>'
        parts.append(f'<details style="margin-top: 6px">{summary}{_paragraph(text)}</details>')
    return frame(passed, "".join(parts))


def answer_card(look: bool | str | None, question: str, answer: str, guess: str) -> str:
    """Make a card of an answered question: the answer is large. guess: "" if there was none."""
    sign, ink, _ = LOOKS[look]
    beside = f'<span style="color: {ink}"> {sign} you: {html.escape(guess)}</span>' if guess else ""
    return frame(
        look,
        f'<div style="font-size: 13px">{marked(question)}</div>'
        f'<div><b style="font-size: 22px">{html.escape(answer)}</b>{beside}</div>',
    )


def score_card(text: str, looks: Sequence[bool | str | None]) -> str:
    """Make a card of a score, with a dot for each of its parts."""
    dots = (
        f'<span style="color: {LOOKS[look][1]}">{"●" if look else "○"}</span>' for look in looks
    )
    shown = f'<div aria-hidden="true" style="letter-spacing: 4px">{"".join(dots)}</div>'
    return frame(None, f"<b>{html.escape(text)}</b>{shown}")


def _paragraph(text: str) -> str:
    if "\n" in text:
        return f'<div style="{CODE}; margin: 6px 0">{html.escape(text)}</div>'
    word = re.match("[a-z]{2,} (?!=)", text)  # and not code, such as `pair = …`
    text = text[:1].upper() + text[1:] if word else text
    return f'<div style="margin: 6px 0">{marked(text)}</div>'


def marked(text: str) -> str:
    """Convert a line of text to HTML; what stands in `backticks` becomes code."""
    code = rf'<code style="background: none; padding: 0; color: inherit; {CODE}">\1</code>'
    return re.sub("`([^`]+)`", code, html.escape(text))
