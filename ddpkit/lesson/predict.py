"""Ask the reader a question before the cell that answers it; show the guess beside the answer.

    hops = predict("Hops of a ring of 4 ranks?")    # with a list of choices: a row of buttons
    hops                                            # a cell's last line: shows a field to fill in
    ...
    hops.answer(run_of_4.hops)                      # "Hops of a ring of 4 ranks? 6. ≠ you: 8"
    predict.score()                                 # at the end: "2 of 3 predictions right."

`predict` is the module's object of that name. A guess is right if it equals the answer, or is near
enough where an error is allowed. The field may stay empty. Guesses after the answer don't count;
asking the question again allows a new one. A wrong guess is amber; red is for failed checks.
"""

from collections.abc import Sequence
from functools import cached_property

from ..tools.units import count
from .card import WIDEST, answer_card, marked, score_card
from .page import BLUE
from .widgets import WRAPPED, Live, asking


class Prediction(Live):
    """A question that asks the reader for a guess; a notebook cell shows it with an entry field.

    question: the text of the question. choices: the possible answers, shown as buttons; if there
        are none, the field takes a number.
    guess: what the reader entered, a number or one of `choices`; None if nothing valid was entered.
    answered: whether `answer` has been called, after which guesses don't count.
    right: whether the guess was right; None before `answer` was called, or if there was no guess.
    """

    def __init__(self, question: str, choices: Sequence[str] = ()):
        super().__init__(f"Your prediction: {question}", None)
        self.question, self.choices = question, list(choices)
        self.guess: float | str | None = None
        self.answered = False
        self.right: bool | None = None  # None: not answered, or nothing was entered

    @cached_property
    def box(self):
        """Return an ipywidgets box with the question, a field or buttons, and a note on the guess.

        It is created on first use. The note says that a guess is kept, is no number or is too late.
        """
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
        """Return the guess as text for the reader, such as "1,024"; `guess` must not be None."""
        return self.guess if self.choices else in_digits(self.guess, 6)

    def enter(self, guess: float | str) -> str:
        """Store a guess in the attribute `guess`; return a sentence that says whether it counts.

        Once `answer` has been called, a guess doesn't count, and isn't stored. If a number is asked
        for and the argument can't be read as one, the attribute becomes None.

        guess: one of `choices`; without choices, a number or the text of one, as `float` takes it.
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
        """Reveal the right answer; return a card that shows it beside the reader's guess.

        The card is a subclass of str that a notebook displays as HTML. Its text is such as
        "Hops? 6. ≠ you: 8". If there is a guess, the call sets `right`; later guesses don't count.

        value: the right answer, a number or one of `choices`.
        within: the error that a guessed number may have, as a fraction of `value`: 0.2 allows 20 %.
        ValueError: the question has choices, and `value` isn't one of them.
        """
        if self.choices and value not in self.choices:
            raise ValueError(f"expected one of {self.choices}, got {value!r}")
        self.answered = True
        shown = in_digits(value, 4) if isinstance(value, float) else f"{value}"
        found = f"{self.question} {shown}"
        if self.guess is None:
            return Answer(found, answer_card(None, self.question, shown, ""))
        self.right = self.guess == value
        if not self.choices:
            self.right = abs(self.guess - value) <= within * abs(value)
        sign = "✓" if self.right else "≠"
        page = answer_card(self.right or "surprise", self.question, shown, self.said)
        return Answer(f"{found}. {sign} you: {self.said}", page)


def in_digits(number: float, digits: int) -> str:
    """Return a number as text, rounded to `digits` significant digits: 0.123456 to 4 is "0.1235".

    Trailing zeros are left out: 2.50 is "2.5". Thousands get commas, and all digits before the
    point are kept, even if they are more: 12345.6 to 4 is "12,346". Numbers from 1e15 on, or closer
    to 0 than 0.0001, get an exponent, such as "1e-05".
    """
    long = abs(number) < 1e15 and round(abs(number)) >= 10**digits
    return f"{number:,.0f}" if long else f"{number:,.{digits}g}"


class Answer(str):
    """A string that a notebook displays as a card, a framed block of HTML.

    `Prediction.answer` and `predict.score` return one. Answer(text, page) makes one. text: the
    string itself, shown where there is no browser. page: the card's HTML, kept as an attribute.
    """

    def __new__(cls, text: str, page: str):
        made = super().__new__(cls, text)
        made.page = page
        return made

    def __repr__(self):
        return str(self)

    def _repr_html_(self):
        return self.page


class Predictions:
    """All questions that a notebook asks its reader, collected in one callable object, `predict`.

    made: {text of the question: its `Prediction`}.
    """

    def __init__(self):
        self.made: dict[str, Prediction] = {}

    def __call__(self, question: str, choices: Sequence[str] = ()) -> Prediction:
        """Return a `Prediction`, which asks for a number or for one of `choices`.

        A cell displays it, as a field or as buttons, if it is the cell's last value. Asking the
        same question again replaces the earlier `Prediction`, with its guess.
        """
        self.made[question] = Prediction(question, choices)
        return self.made[question]

    def score(self) -> str:
        """Return how many guesses were right, such as "2 of 3 predictions right, 1 not entered."

        A notebook displays the result, a subclass of str, as a card with a dot for each question.
        Questions without a guess, or whose `answer` wasn't called, so that the guess can't be
        judged, are counted as "not entered", and not among the 3.
        """
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
