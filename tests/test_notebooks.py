"""Notebooks as files: what a reader, GitHub and nbval need of them. nbval runs them."""

import ast
import base64
import re
import statistics
from pathlib import Path

import pytest

from ddpkit.exercises.checker import source_of
from ddpkit.lesson import check

nbformat = pytest.importorskip("nbformat", reason="Jupyter isn't installed")
refresh = pytest.importorskip("refresh")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MACHINE_PATH = re.compile(
    r"(?<![\w.])(/(home|Users|root|work|tmp|usr|opt|var|private)/\w|[A-Z]:\\\w)"
)


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture(scope="module")
def notebook(path):
    return nbformat.read(path, as_version=4)


@pytest.fixture(scope="module")
def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def lines(cell) -> list[str]:
    return [line for line in cell.source.splitlines() if line.strip()]


def tagged(cells, *tags) -> list:
    return [cell for cell in cells if set(tags) & set(cell.metadata.get("tags", []))]


def imports(cell) -> bool:
    """Whether it does so itself: in a cell with %%ranks or %%writefile, another program would."""
    if cell.source.startswith("%%"):
        return False
    source = re.sub(r"^\s*[%!].*", "", cell.source, flags=re.MULTILINE)  # no magics
    return any(isinstance(each, ast.Import | ast.ImportFrom) for each in ast.parse(source).body)


def test_is_as_refresh_leaves_it(path, notebook):
    clean = nbformat.read(path, as_version=4)
    refresh.normalise(clean)
    assert notebook == clean, f"make refresh, or: python scripts/refresh.py {path.name}"


def test_is_valid_and_small(path, notebook):
    nbformat.validate(notebook)
    assert path.stat().st_size < 1_000_000
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)


def test_every_code_cell_was_run_in_order(code):
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(cell.source.strip() for cell in code)


def test_stores_neither_stderr_nor_what_is_live(notebook, code):
    assert "widgets" not in notebook.metadata
    for cell in code:
        for output in cell.outputs:
            assert output.get("name") != "stderr", output.text
            for kind in refresh.LIVE:
                assert kind not in output.get("data", {}), cell.source


def test_stores_no_path_of_a_machine(notebook):
    for cell in notebook.cells:
        texts = [cell.source]
        for output in cell.get("outputs", []):
            texts += [output.get("text", ""), output.get("evalue", "")]
            texts += output.get("traceback", [])
            for kind, data in output.get("data", {}).items():
                if not kind.startswith("image/"):
                    texts.append(str(data))
        for text in texts:
            found = MACHINE_PATH.search(re.sub(r"\x1b\[[\d;]*m", "", text))
            assert not found, text[max(0, found.start() - 80) :][:200]


def test_what_ought_to_be_equal_is(code):
    """As stored: nbval would compare one False with another, and be content."""
    wrong = re.compile(r"(equal gradients|same result|bit by bit|equal scales): False")
    for cell in code:
        for output in cell.outputs:
            assert not wrong.search(output.get("text", "")), output.text


@pytest.mark.slow  # not slow: a run that --anyway stored, on a busy machine, is refused before long
def test_no_stored_run_was_disturbed(notebook):
    assert refresh.disturbed(notebook) == [], "python scripts/refresh.py, on a quiet machine"


def test_errors_are_meant(code):
    for cell in code:
        failed = any(output.output_type == "error" for output in cell.outputs)
        assert failed == bool(tagged([cell], "raises-exception")), cell.source


def test_few_outputs_go_uncompared(code):
    assert len(tagged(code, "nbval-ignore-output", "nbval-skip")) <= len(code) / 5
    assert len(tagged(code, "raises-exception")) <= len(code) / 5
    for cell in code:
        for tag in cell.metadata.get("tags", []):
            if tag.startswith(("nbval", "raises")):
                assert tag in ("nbval-ignore-output", "nbval-skip", "raises-exception")
        assert not re.search(r"#\s*(NBVAL|PYTEST_VALIDATE)_", cell.source), "use the cell's tags"


def test_code_cells_are_short(code):
    lengths = sorted(len(lines(cell)) for cell in code)
    assert statistics.median(lengths) <= 5, lengths
    assert lengths[int(0.9 * (len(lengths) - 1))] <= 12, lengths
    assert max(len(cell.source.splitlines()) for cell in code) <= 25  # with blank lines


def test_predictions_are_shown(code):
    """A field that is made and not shown can't be filled in."""
    for cell in code:
        for name in re.findall(r"^(\w+) = predict\(", cell.source, re.MULTILINE):
            assert lines(cell)[-1] == name, cell.source


def test_prose_cells_are_short(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            words = re.findall(r"\S*\w\S*", re.sub(r"\]\([^)]*\)|\$[^$]+\$", "]", cell.source))
            assert len(words) <= 120, (len(words), cell.source[:80])


def test_formulas_are_typeset(path, notebook):
    """Outside of code, in the two notebooks that have most of them."""
    if path.stem[:2] not in ("08", "09"):
        pytest.skip("few formulas")
    typed = re.compile(r"[=^∑√∘≤≥∈′ᵀ²⁻ᵐᵢⱼ₋₁₀]|\w·\w|[A-Z] × [A-Z]|\b[mNDW]−|\([mx], ")
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            no_code = re.sub(r"`[^`]*`|\$\$.*?\$\$|\$[^$]+\$", "", cell.source, flags=re.DOTALL)
            found = typed.search(re.sub(r"\]\([^)]*\)", "]", no_code))
            assert not found, no_code[max(0, found.start() - 40) :][:80]


def test_prose_comes_between_code(notebook):
    kinds = "".join(cell.cell_type[0] for cell in notebook.cells)
    assert "ccc" not in kinds, notebook.cells[kinds.index("ccc") + 2].source


def test_no_cell_ends_with_a_semicolon(code):
    for cell in code:
        assert not cell.source.rstrip().endswith(";"), cell.source


def test_imports_are_in_one_cell_at_the_top(code):
    importing = [number for number, cell in enumerate(code) if imports(cell)]
    assert importing in ([], [0], [1], [0, 1]), [code[number].source for number in importing]


def test_imports_are_folded(path, code):
    """They explain nothing: a click shows them."""
    folded = [cell.metadata.get("jupyter", {}).get("source_hidden", False) for cell in code]
    if path.stem[:2] > "00":
        assert folded == [imports(cell) for cell in code]


def test_pictures_come_with_words(notebook):
    for cell, following in zip(notebook.cells, [*notebook.cells[1:], None], strict=True):
        outputs = cell.get("outputs", [])
        if any("image/png" in output.get("data", {}) for output in outputs):
            said = [each.get("text") or each.get("data", {}).get("text/plain") for each in outputs]
            told = any(text and not text.startswith("<Figure") for text in said)
            assert told or (following and following.cell_type == "markdown"), cell.source


def test_pictures_fit_the_screen(code):
    """At 1400 × 900. Stored at twice the size that is shown, which their metadata say."""
    for cell in code:
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                png = base64.b64decode(output.data["image/png"])
                width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
                shown = output.metadata.get("image/png", {"width": width, "height": height})
                assert shown["height"] <= 700, cell.source
                assert shown["width"] <= 1040, cell.source


def test_opens_and_closes_as_all_do(notebook):
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    for words in ("You will build", "You need", "Time"):
        assert words in "\n".join(prose[:3]), words
    for words in ("What you can now say", "In the wild"):
        assert words in "\n".join(prose[-4:]), words


def test_what_was_asked_for_has_its_cells():
    """docs/source_items.md: numbered rows, in each a cell that exists and was run."""
    text = (Path(__file__).parents[1] / "docs/source_items.md").read_text()
    rows = re.findall(r"^\| (\d+) \| [A-E] \| .* \| (.*) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert f"{len(rows)} of them" in text
    ids = set()
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        ids |= {(path.stem[:2], cell.id) for cell in cells if cell.cell_type == "code"}
    for number, where in rows:
        named = re.findall(r"(\d\d) `([\w-]+)`", where)
        assert named, number
        assert set(named) <= ids, f"row {number}: {set(named) - ids}"


def test_there_is_much_to_write():
    """76 exercises and 620 lines in 00 to 11, counted in the solutions, without what is given."""
    exercises, written = 0, 0
    for path in NOTEBOOKS[:12]:
        notebook = nbformat.read(path, as_version=4)
        code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
        for name in set(re.findall(r"^check\.(\w+)\(\w+\)", code, re.MULTILINE)):
            exercises += 1
            written += lines_to_write(getattr(check, name))
    assert exercises >= 76
    assert written >= 620


def lines_to_write(exercise) -> int:
    source = source_of(exercise.reference)
    (answer,) = ast.parse(source).body
    parts = [answer]
    if isinstance(answer, ast.ClassDef):
        methods = [each for each in answer.body if isinstance(each, ast.FunctionDef)]
        parts = [method for method in methods if method.name not in exercise.given]
    found = 0
    for part in parts:
        body = part.body[1:] if ast.get_docstring(part) else part.body
        if body:
            text = source.splitlines()[body[0].lineno - 1 : body[-1].end_lineno]
            found += sum(not re.match(r"\s*(#|$)", line) for line in text)
    return found


def test_what_would_be_slow_to_open_is_refused():
    """`make refresh` looks at what a reader would save: with widgets, and what is live only."""
    large = nbformat.v4.new_output("display_data", {"image/svg+xml": "x" * 300_001})
    cell = nbformat.v4.new_code_cell("draw()", outputs=[large])
    with pytest.raises(ValueError, match=r"expected 300000 bytes, got 3\d+ of: draw\(\)"):
        refresh.refuse_large(nbformat.v4.new_notebook(cells=[cell]))
    with pytest.raises(ValueError, match="at most 3000000 bytes"):
        refresh.refuse_large(nbformat.v4.new_notebook(metadata={"widgets": "x" * 3_000_000}))
