"""Write cards in HTML that show the result of an exercise's check, or a reader's guess.

Most functions take a verdict, which gives the card its sign and its colours: True is a right answer
(✓), False a failed check (✗), "surprise" a wrong guess (≠), None stands for no answer (·). A card
has its own light background, so it is legible in dark themes as well. Texts are escaped: HTML in
them is shown as it is written. Words in backticks are shown as code in titles, in questions, and in
paragraphs of a single line; a paragraph of several lines is shown verbatim in a code font.
"""

import html
import re
from collections.abc import Mapping, Sequence

LOOKS = {  # {verdict: (sign, colour of sign and border, background)}
    True: ("✓", "#006B4F", "#EDF8F3"),
    False: ("✗", "#B00020", "#FDF0F1"),
    "surprise": ("≠", "#8A5A00", "#FFF6E0"),
    None: ("·", "#555555", "#F5F5F5"),
}
WIDEST = 960  # pixels, of cards and pictures: JupyterLab has room for them on a screen of 1400
NONE: dict[str, str] = {}
SANS = "font-family: var(--jp-ui-font-family, sans-serif)"  # JupyterLab's own font, if there is one
CODE = "font-family: var(--jp-code-font-family, monospace); font-size: 13px; line-height: 1.4"
CODE += "; white-space: pre-wrap"


def frame(look: bool | str | None, inside: str) -> str:
    """Return HTML that wraps `inside`, itself HTML, in a card of the verdict's colours.

    look: the verdict: True, False, "surprise" or None. Only its colours are used; its sign is left
        to the caller.
    """
    _, ink, ground = LOOKS[look]
    style = f"background: {ground}; border: 1px solid {ink}; border-left-width: 8px"
    style += "; border-radius: 6px; padding: 8px 14px; margin: 4px 0; color: #111"
    style += f"; max-width: {WIDEST}px; box-sizing: border-box"  # as wide as charts
    return f'<div style="{style}; {SANS}; font-size: 15px; line-height: 1.45">{inside}</div>'


def card(passed: bool | None, title: str, *said: str, folds: Mapping[str, str] = NONE) -> str:
    """Return the HTML of a card with a sign, a title in bold and paragraphs below it.

    passed: True for a ✓, False for a ✗, None for a ·.
    title, said: the title and the paragraphs, plain text. Words in backticks are shown as code, and
        a paragraph of several lines verbatim, in a code font. Empty paragraphs are left out.
    folds: {text to click on: a paragraph that then unfolds}, shown at the foot of the card.
    """
    sign, ink, _ = LOOKS[passed]
    head = f'<b style="color: {ink}; font-size: 16px">{sign} {marked(title)}</b>'
    parts = [head, *map(_paragraph, filter(None, said))]
    for name, text in folds.items():
        summary = f'<summary style="cursor: pointer">{html.escape(name)}</summary>'
        parts.append(f'<details style="margin-top: 6px">{summary}{_paragraph(text)}</details>')
    return frame(passed, "".join(parts))


def answer_card(look: bool | str | None, question: str, answer: str, guess: str) -> str:
    """Return the HTML of a card with a question, its answer in large letters and a guess.

    look: the verdict on the guess, which gives the colours: True if it is right, "surprise" if it
        is wrong, None if the reader hasn't guessed.
    question: plain text, in which `code` stands in backticks. answer: plain text, shown as it is.
    guess: what the reader entered; "" if nothing was entered, which leaves it out of the card.
    """
    sign, ink, _ = LOOKS[look]
    beside = f'<span style="color: {ink}"> {sign} you: {html.escape(guess)}</span>' if guess else ""
    return frame(
        look,
        f'<div style="font-size: 13px">{marked(question)}</div>'
        f'<div><b style="font-size: 22px">{html.escape(answer)}</b>{beside}</div>',
    )


def score_card(text: str, looks: Sequence[bool | str | None]) -> str:
    """Return the HTML of a card with a score in words, and a dot for each question.

    text: the score as plain text, for example "2 of 3 predictions right.".
    looks: for each question, the verdict on the reader's guess, which gives its dot the colour. The
        dot is filled if there was a guess (True or "surprise"), and open if there was none (None).
    """
    dots = (
        f'<span style="color: {LOOKS[look][1]}">{"●" if look else "○"}</span>' for look in looks
    )
    shown = f'<div aria-hidden="true" style="letter-spacing: 4px">{"".join(dots)}</div>'
    return frame(None, f"<b>{html.escape(text)}</b>{shown}")


def _paragraph(text: str) -> str:
    """Return plain text as an HTML paragraph.

    A text of several lines is kept verbatim in a code font. In a text of one line, words in
    backticks are set as code; and if such a text begins with a word of two or more small letters
    and a space ("rank 1 waits"), it gets a capital letter. An assignment ("pair = 3") gets none.
    """
    if "\n" in text:
        return f'<div style="{CODE}; margin: 6px 0">{html.escape(text)}</div>'
    word = re.match("[a-z]{2,} (?!=)", text)  # and not code, such as `pair = …`
    text = text[:1].upper() + text[1:] if word else text
    return f'<div style="margin: 6px 0">{marked(text)}</div>'


def marked(text: str) -> str:
    """Return a line of plain text as HTML, with the words between `backticks` set as code."""
    code = rf'<code style="background: none; padding: 0; color: inherit; {CODE}">\1</code>'
    return re.sub("`([^`]+)`", code, html.escape(text))
