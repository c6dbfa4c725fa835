"""The state of the house in figures: `python tools/house.py`. tests/test_house.py holds the limits.

Everything but the exercises' references is read from the sources; nothing is run.
"""

import ast
import inspect
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    "fast",
    "tools",
    "runtime",
    "exercises",
    "lesson",
    "bench",
)  # folders; a file beside them is a subject
NO_SUBJECTS = "__init__", "debug", "doctor", "explain", "train"
LIMITS = {"ddpkit": 13_500, "tests": 13_500, "subject": 200}  # ddpkit and tests: not yet there
RATCHET = {"ddpkit": 26_141, "tests": 22_018}  # nor may they grow; lower it with every cut
COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
NO_SYNTAX = "annotation", "returns", "ctx"
NOT_OURS = {"_device_types", "_name"}  # of torch's process groups and Python's processes
FLOORS_ABOVE = {"exercises", "lesson", "bench", "debug", "doctor", "explain", "train", "fast"}
SMALL = 30  # syntax nodes; below that, functions may be alike
ALIKE = 0.75  # of the runs of four nodes that either of two functions has


def sources(root: Path = ROOT) -> list[Path]:
    return sorted((root / "ddpkit").rglob("*.py"))


def part(path: Path, root: Path = ROOT) -> str:
    """'subjects', 'runtime', ... or 'tests'."""
    top, *inner = path.relative_to(root).with_suffix("").parts
    if top == "tests":
        return top
    if inner[0] in NO_SUBJECTS:
        return "others"
    return inner[0] if inner[0] in PARTS else "subjects"


def lines(path: Path) -> int:
    return len(text(path).splitlines())


@cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


def name(path: Path, root: Path = ROOT) -> str:
    return path.relative_to(root).as_posix()


def lines_by_part(root: Path = ROOT) -> Counter:
    count = Counter()
    for path in [*sources(root), *(root / "tests").rglob("*.py")]:
        count[part(path, root)] += lines(path)
    count["ddpkit"] = count.total() - count["tests"]
    return count


def subjects(root: Path = ROOT) -> dict[str, int]:
    """{file: lines} of the subjects, longest first."""
    found = {
        name(path, root): lines(path) for path in sources(root) if part(path, root) == "subjects"
    }
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def comments(path: Path) -> float:
    """Comments in 100 lines."""
    tokens = tokenize.generate_tokens(io.StringIO(text(path)).readline)
    return 100 * sum(token.type == tokenize.COMMENT for token in tokens) / max(1, lines(path))


def nested_comprehensions(path: Path) -> list[str]:
    """A comprehension inside another, as file:line."""
    inside = set()
    for outer in ast.walk(tree(path)):
        if isinstance(outer, COMPREHENSIONS):
            inner = (node for node in ast.walk(outer) if node is not outer)
            inside |= {node.lineno for node in inner if isinstance(node, COMPREHENSIONS)}
    return [f"{path.name}:{line}" for line in sorted(inside)]


# Names.


def is_private(word: str) -> bool:
    return word.startswith("_") and not word.endswith("__")


def names_given(path: Path) -> set[str]:
    """Every name that this file gives: by def, class or assignment, also to an attribute."""
    given = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            given.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            given.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            given.add(node.attr)
    return given


def private_names_across(root: Path = ROOT) -> list[str]:
    """Uses, as 'file:line name', of a private name that only another module gives; a base may."""
    given = {path: names_given(path) for path in sources(root)}
    everywhere = set().union(*given.values()) - NOT_OURS
    found = set()
    for path, own in given.items():
        for node in ast.walk(tree(path)):
            used = []
            if isinstance(node, ast.ImportFrom) and (
                node.level or (node.module or "").startswith("ddpkit")
            ):
                used = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in (
                "self",
                "super()",
            ):
                used = [node.attr] if node.attr in everywhere - own else []
            found |= {
                f"{name(path, root)}:{node.lineno} {word}" for word in used if is_private(word)
            }
    return sorted(found)


def names_above_the_runtime(root: Path = ROOT) -> list[str]:
    """What stands above the runtime and is named there, in an import or a string."""
    by_part = [(path.stem, part(path, root)) for path in sources(root)]
    instruments = {stem for stem, where in by_part if where == "tools"}  # and names for them
    files = {stem for stem, where in by_part if where == "subjects"} - instruments
    found = []
    for path in sources(root):
        if part(path, root) != "runtime":
            continue
        nodes = list(ast.walk(tree(path)))
        docstrings = [node.value for node in nodes if is_docstring(node)]
        for node in nodes:
            words, above = "", FLOORS_ABOVE
            if isinstance(node, ast.Import | ast.ImportFrom):
                words, above = ast.unparse(node), FLOORS_ABOVE | files
            elif isinstance(node, ast.Constant) and node not in docstrings:
                words = str(node.value)
            named = set(re.findall(r"\w+", words)) & above
            found += [f"{name(path, root)}:{node.lineno} {word}" for word in sorted(named)]
    return found


def replaced_methods(root: Path = ROOT) -> list[str]:
    """`SomeClass.method = ...` and setattr(SomeClass, ...), as 'file:line Class.method'."""
    found = []
    for path in sources(root):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                owner = ast.unparse(node.value)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
                owner = ast.unparse(node.args[0])
            else:
                continue
            if re.match(r"type\(|(\w+\.)*[A-Z]\w*[a-z]\w*$", owner):
                found.append(f"{name(path, root)}:{node.lineno} {ast.unparse(node)}")
    return found


# Algorithms spelled twice.


def shape(function: ast.FunctionDef) -> list[str]:
    """The syntax in reading order, without docstring, annotations and the names of variables."""
    words = []

    def visit(node: ast.AST) -> None:
        more = {ast.Attribute: "attr", ast.Constant: "value", ast.keyword: "arg"}.get(type(node))
        words.append(f"{type(node).__name__} {getattr(node, more) if more else ''}")
        for field, child in ast.iter_fields(node):
            for each in child if isinstance(child, list) else [child]:
                if isinstance(each, ast.AST) and field not in NO_SYNTAX and not is_docstring(each):
                    visit(each)

    visit(function)
    return words


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def functions(path: Path) -> Iterator[tuple[str, set]]:
    """(name, runs of four nodes) of every function and method that isn't small."""
    for node in ast.walk(tree(path)):
        if isinstance(node, FUNCTIONS):
            words = shape(node)
            if len(words) >= SMALL:
                yield node.name, set(zip(words, words[1:], words[2:], words[3:], strict=False))


def spelled_twice(root: Path = ROOT) -> list[str]:
    """Pairs of functions in two modules outside fast/ whose syntax is nearly the same."""
    known = [
        (path, called, runs)
        for path in sources(root)
        if part(path, root) != "fast"
        for called, runs in functions(path)
    ]
    found = []
    for (one, called, runs), (other, also, others) in combinations(known, 2):
        enough = ALIKE if called != also else ALIKE / 2
        fewer, more = sorted((len(runs), len(others)))
        if one == other or fewer < enough * more:  # whose sizes differ that much are not alike
            continue
        if len(runs & others) >= enough * len(runs | others):
            found.append(f"{name(one, root)} {called} ~ {name(other, root)} {also}")
    return found


def references_beside_the_library() -> list[str]:
    """Exercises with a reference of their own though a subject or an instrument has that name."""
    from importlib import import_module

    from ddpkit import exercises

    library = defaultdict(list)
    for path in sources():
        if part(path) in ("subjects", "tools"):
            module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for word, thing in vars(module).items():
                if getattr(thing, "__module__", "").startswith("ddpkit"):
                    library[word].append(thing)
    found = []
    for word, exercise in vars(exercises).items():
        reference = getattr(exercise, "reference", None)
        if reference and word in library and reference not in library[word]:
            found.append(f"{word}: {inspect.getmodule(library[word][0]).__name__} has one, too")
    return found


def told(title: str, found: Iterable[str]) -> str:
    found = list(found)
    return "\n".join([f"{title}: {len(found)}", *(f"    {each}" for each in found)])


def main() -> None:
    for what, count in lines_by_part().items():
        print(f"{what:>12} {count:>7,} lines" + (f" of {LIMITS[what]:,}" if what in LIMITS else ""))
    over = [f"{file} {count}" for file, count in subjects().items() if count > LIMITS["subject"]]
    longest, count = next(iter(subjects().items()))
    print(f"longest subject: {longest}, {count} lines of {LIMITS['subject']}")
    print(told("subjects over the limit", over))
    print(told("private names across modules", private_names_across()))
    print(told("names above the runtime in it", names_above_the_runtime()))
    print(told("methods of a class replaced from outside", replaced_methods()))
    print(told("algorithms spelled twice", spelled_twice()))
    print(told("references beside the library", references_beside_the_library()))
    print(
        told(
            "nested comprehensions",
            (each for path in sources() for each in nested_comprehensions(path)),
        )
    )
    print("comments in 100 lines:")
    for path in sources():
        print(f"{comments(path):>8.1f}  {name(path)}")


if __name__ == "__main__":
    main()
