"""Ask the reader for a guess before the cell that answers it, and show it beside the answer.

    hops = predict("Hops of a ring of 4 ranks?")                # shows a field to fill in
    which = predict("Which sends less?", ["ring", "server"])    # or a row of buttons
    ...
    hops.answer(run_of_4.hops)                                  # 6 ≠ you: 8
    predict.score()                                             # at the end of the notebook

Nothing has to be entered: then the answer stands alone. What is entered after the answer was shown
doesn't count until the question is asked again. A wrong guess is amber, as a surprise; red is for
failed checks.
"""

from collections.abc import Sequence
from functools import cached_property

from ..tools.units import count
from .card import WIDEST, answer_card, marked, score_card
from .page import BLUE
from .widgets import WRAPPED, Live, asking


class Prediction(Live):
    """A question to the reader, asked before the answer is known; a cell shows it as a field.

    question: what is asked. choices: the answers to choose from, as buttons; none: a number is
        asked for.
    guess: what was entered, a number or one of `choices`; None: nothing.
    right: whether the guess was right; None: there was no answer or no guess.
    """

    def __init__(self, question: str, choices: Sequence[str] = ()):
        super().__init__(f"Your prediction: {question}", None)
        self.question, self.choices = question, list(choices)
        self.guess: float | str | None = None
        self.answered = False
        self.right: bool | None = None  # None: not answered, or nothing was entered

    @cached_property
    def box(self):
        """Return the widget: the question, its field or buttons, and a note on what was entered."""
        import ipywidgets

        asked = ipywidgets.HTML(f"<b>Your prediction:</b> {marked(self.question)}")
        if self.choices:
            style = {"button_width": "auto"}
            field = ipywidgets.ToggleButtons(options=self.choices, value=None, style=style)
        else:
            field = ipywidgets.Text(
                placeholder="a number", layout={"width": "12em", "max_width": "100%"}
            )
        kept = ipywidgets.HTML("&nbsp;")

        def enter(change) -> None:
            kept.value = self.enter(change["new"])

        field.observe(enter, "value")
        entry = ipywidgets.HBox([field, kept], layout=WRAPPED)
        box = asking(entry, asked)
        box.children = asked, *box.children[:-1]  # the question above its field
        layout = {"border": "1px solid #888", "border_left": f"8px solid {BLUE}"}
        box.layout = layout | {"padding": "6px 14px", "margin": "4px 0", "max_width": f"{WIDEST}px"}
        return box

    @property
    def said(self) -> str:
        """Return the guess as text for the reader. There must be one."""
        return self.guess if self.choices else f"{self.guess:,.6g}"

    def enter(self, guess: float | str) -> str:
        """Take what the reader entered; return a sentence that says whether it counts.

        It doesn't count if the answer has been shown already, or if a number is asked for and this
        is none.
        """
        if self.answered:
            return "Too late for this run: the answer is known. Run this cell again to guess anew."
        if not self.choices:
            try:
                guess = float(guess)
            except ValueError:
                guess = None
        self.guess = guess
        return "That is no number." if guess is None else f"Kept: {self.said}."

    def answer(self, value: float | str, within: float = 0.0) -> str:
        """Give the answer; return a card that shows it beside the guess.

        The card is a text that the browser shows as HTML. From now on, guesses don't count.

        value: the answer, a number or one of `choices`.
        within: the error allowed in a guess, as a share of the number: 0.2 for a measured one.
        ValueError: the value isn't among the choices.
        """
        if self.choices and value not in self.choices:
            raise ValueError(f"expected one of {self.choices}, got {value!r}")
        self.answered = True
        shown = f"{value:,.4g}" if isinstance(value, float) else f"{value}"
        found = f"{self.question} {shown}"
        if self.guess is None:
            return Answer(found, answer_card(None, self.question, shown, ""))
        self.right = self.guess == value
        if not self.choices:
            self.right = abs(self.guess - value) <= within * abs(value)
        sign = "✓" if self.right else "≠"
        page = answer_card(self.right or "surprise", self.question, shown, self.said)
        return Answer(f"{found}. {sign} you: {self.said}", page)


class Answer(str):
    """A text that the browser shows as a card. page: the card's HTML."""

    def __new__(cls, text: str, page: str):
        made = super().__new__(cls, text)
        made.page = page
        return made

    def __repr__(self):
        return str(self)

    def _repr_html_(self):
        return self.page


class Predictions:
    """A notebook's predictions, by question. Call it to ask one: `predict(question)`."""

    def __init__(self):
        self.made: dict[str, Prediction] = {}

    def __call__(self, question: str, choices: Sequence[str] = ()) -> Prediction:
        """Ask for a number, or for one of `choices`; return the `Prediction`, which a cell shows.

        Asking the same question again discards the earlier guess.
        """
        self.made[question] = Prediction(question, choices)
        return self.made[question]

    def score(self) -> str:
        """Return text, in a notebook a card: how many of the predictions made are right."""
        verdicts = [prediction.right for prediction in self.made.values()]
        judged = [right for right in verdicts if right is not None]
        left = len(self.made) - len(judged)
        said = f"{sum(judged)} of {len(judged)} predictions right"
        said += f", {left} not entered." if left else "."
        if not judged:
            said = f"{count(left, 'prediction')}, none entered."
        looks = ["surprise" if right is False else right for right in verdicts]
        return Answer(said, score_card(said, looks))


predict = Predictions()
