"""Cards: right, wrong and not written differ in sign and colour; nothing of theirs is HTML."""

import re

from ddpkit.lesson.card import card


def test_right_wrong_and_neither_differ_in_sign_and_colour():
    pages = [card(passed, "ring") for passed in (True, False, None)]
    assert [re.search(r"(.) ring</b>", page)[1] for page in pages] == ["✓", "✗", "·"]
    assert len({re.search("background: (.*?);", page)[1] for page in pages}) == 3
    assert len({re.search("border: (.*?);", page)[1] for page in pages}) == 3


def test_what_is_said_is_text_and_code_is_set_as_code():
    page = card(False, "<b> `c`", "so `x < 2`", "two\n lines", "", folds={"hint": "add `y`"})
    assert re.search("&lt;b&gt; <code [^>]*>c</code></b>", page)
    assert re.search("So <code [^>]*>x &lt; 2</code></div>", page)
    assert ">pair = 0</div>" in card(False, "merge", "pair = 0")  # code begins as it is
    assert re.search(r"pre-wrap[^>]*>two\n lines</div>", page)
    assert re.search("<details [^>]*><summary [^>]*>hint</summary><div [^>]*>Add <code", page)
