"""Measure the house: `python scripts/house.py` prints it, tests/test_house.py holds the figures.

All is read from the sources, and nothing is run, but for the exercises' references: those need an
import.
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
PARTS = "fast", "runtime", "inspect", "audit", "exercises", "lesson", "bench"  # folders
PARTS += ("resume_check",)
INSTRUMENTS = "tools", "memory", "cost", "floats"  # anything else is a subject
NO_SUBJECTS = "__init__", "debug", "doctor", "explain", "train"
LIMITS = {  # where the house is going
    "code lines of a subject": 130,  # without docstrings, comments and blanks, which are free
    "tokens a code line": 9.5,  # this and the next two: of all subjects together
    "packed assignments in 1,000 lines": 8,
    "comments in 100 lines": 6,
    "docstrings that begin askew": 0,
    "words of dialect": 0,  # in docstrings and comments
    "variables called each": 0,  # a variable has the name of the thing
}
RATCHET = {  # lines; lower it with every cut
    "ddpkit": 52_635,
    "tests": 35_508,
    "runtime": 7_539,
    "inspect": 2_059,
    "lesson": 6_815,
    "bench": 2_600,
    "fast": 1_181,
    "instruments": 4_129,
}
HELD = {  # today's figures: change one only for the better
    "tokens a code line": 9.5,
    "packed assignments in 1,000 lines": 1,
    "comments in 100 lines": 6,
    "docstrings that begin askew": 0,
    "words of dialect": 0,
    "variables called each": 0,
}
LIMITS |= {"lines an exercise, all in": 90, "mistakes of an exercise, at most": 12}
HELD_EXERCISES = {
    "lines an exercise, all in": 89.95,
    "the same, of checked functions alone": 107.96,  # it has no limit
    "mistakes of an exercise, at most": 10,
}
LIMITS_OUTSIDE = {  # and held there
    "lines of tests for a line of ddpkit": 0.70,
    "files at the top of ddpkit": 24,
    "words of docs/decisions.md": 5_000,
    "lines of README.md": 200,
}
STILL_OVER: dict[str, int] = {}  # {subject: the code lines it may have until it is cut}
MORE_IS_BETTER = {"comments in 100 lines"}
ASKEW = re.compile(  # no verb, noun or article: a docstring should begin with one
    "(What|Who|Whose|Whom|Which|Whether|Where|When|Why|How|If|As|Of|To|By|For|On|In|Inside|At|From"
    "|With|Without|After|Before|Between|Over|Since|Because|So|And|Or|But|Else|Instead|That|Those"
    r"|It|Its|There|Not)\b"
)
DIALECT = re.compile(  # no native engineer writes these
    r"\bso (many|much|long|young|few)\b|\b(is|are|was|were|be) told\b|\bhears?\b|, too\b"
    r"|\bof which all\b|\b[Ww]hoever\b|\b([Ss]ome|[Nn]o)body\b|\bof (theirs|ours)\b"
    r"|(\bor e|, e|\bE)lse\b|\bWho\b|\bwho (just|else|still)\b"
)
# A constant with its value in a docstring: "256 (SLOTS)", "0.4 s (`SETTLE_S`)", "`EVERY` (8)"
CONSTANT = r"`?(?:\w+\.)?(_?[A-Z][A-Z0-9_]+)`?"
VALUE = r"(\d[\d,.]*)( s| MB)?"
VALUE_AND_NAME = re.compile(rf"{VALUE} \({CONSTANT}\)")
NAME_AND_VALUE = re.compile(rf"{CONSTANT} \({VALUE}\)")
NO_CODE = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
NO_SYNTAX = "annotation", "returns", "ctx"
NOT_OURS = {"_device_types", "_name"}  # of torch's process groups and Python's processes
FLOORS_ABOVE = {"audit", "exercises", "lesson", "bench", "doctor", "explain", "train", "fast"}
FLOORS_ABOVE |= {"resume_check"}
SMALL = 30  # syntax nodes; below that, functions may be alike
ALIKE = 0.75  # of the runs of four nodes that either of two functions has


def sources(root: Path = ROOT) -> list[Path]:
    return sorted((root / "ddpkit").rglob("*.py"))


def part(path: Path, root: Path = ROOT) -> str:
    """Name the part of the house that a file is in: 'subjects', 'runtime', ... or 'tests'."""
    top, *inner = path.relative_to(root).with_suffix("").parts
    if top == "tests":
        return top
    if inner[0] in NO_SUBJECTS:
        return "others"
    if inner[0] in INSTRUMENTS:
        return "instruments"
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


# Density and docstrings.


def density(path: Path) -> Counter:
    """Count lines, code lines (no docstring, comment or blank), tokens, comments and packed."""
    count = Counter(lines=lines(path), packed=len(packed(path)))
    docstrings = {node.lineno for node in ast.walk(tree(path)) if is_docstring(node)}
    code = set()
    inside = 0  # an f-string, which is one token before Python 3.12 and many since
    for token in tokenize.generate_tokens(io.StringIO(text(path)).readline):
        kind = tokenize.tok_name[token.type]
        inside += kind.endswith("STRING_START") - kind.endswith("STRING_END")
        if token.type == tokenize.COMMENT:
            count["comments"] += 1
        elif token.type not in NO_CODE and token.start[0] not in docstrings:
            count["tokens"] += inside == 0
            code |= set(range(token.start[0], token.end[0] + 1))
    count["code"] = len(code)
    return count


def packed(path: Path) -> list[int]:
    """List the lines of `a, b = x, y`, which puts two ideas on one; a swap is one idea."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            target = node.targets[0]
            values = {ast.unparse(each) for each in node.value.elts}
            if isinstance(target, ast.Tuple) and values != {ast.unparse(e) for e in target.elts}:
                found.append(node.lineno)
    return found


def subjects(root: Path = ROOT) -> dict[str, Counter]:
    """{file: density} of the subjects, the one with most code first."""
    found = {
        name(path, root): density(path) for path in sources(root) if part(path, root) == "subjects"
    }
    return dict(sorted(found.items(), key=lambda pair: -pair[1]["code"]))


def askew(path: Path) -> list[str]:
    """Docstrings, as 'line: first sentence', that begin with a word of ASKEW."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)):
            first = (ast.get_docstring(node) or "").split("\n")[0]
            if ASKEW.match(first):  # code and figures stand for nouns
                found.append(f"{node.body[0].lineno}: {first}")
    return found


def dialect(path: Path) -> list[str]:
    """List the docstrings' lines and the comments, as 'line: text', that have a word of DIALECT."""
    lines_of_text = []
    for node in ast.walk(tree(path)):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)) and ast.get_docstring(node):
            docstring = node.body[0]
            lines_of_text += enumerate(docstring.value.value.splitlines(), docstring.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text(path)).readline):
        if token.type == tokenize.COMMENT:
            lines_of_text.append((token.start[0], token.string))
    return [f"{n}: {line.strip()}" for n, line in sorted(lines_of_text) if DIALECT.search(line)]


@cache
def constants(path: Path) -> dict[str, float]:
    """{name: number} of a module's constants, whether assigned one by one or several in a line."""
    found = {}
    for node in tree(path).body:
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=True)
            for one, value in pairs:
                if isinstance(one, ast.Name) and one.id.isupper() and is_number(value):
                    found[one.id] = value.value
    return found


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def stale_values(path: Path, root: Path = ROOT) -> list[str]:
    """List 'NAME: the value said' where a docstring says another value than a constant has.

    A constant that the module imports has the value that it has where it is defined.
    """
    everywhere = defaultdict(set)
    for other in sources(root):
        for constant, value in constants(other).items():
            everywhere[constant].add(value)
    everywhere |= {constant: {value} for constant, value in constants(path).items()}
    found = []
    for node in ast.walk(tree(path)):
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Module)):
            continue
        said = " ".join((ast.get_docstring(node) or "").split())
        pairs = [(name, value, unit) for value, unit, name in VALUE_AND_NAME.findall(said)]
        for constant, value, unit in pairs + NAME_AND_VALUE.findall(said):
            number = float(value.replace(",", "")) * (1e6 if unit == " MB" else 1)
            if constant in everywhere and number not in everywhere[constant]:
                found.append(f"{constant}: {value}{unit}")
    return found


def variables(word: str, path: Path) -> list[int]:
    """List the lines that give a variable the name `word`."""
    found = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == word:
            found.append(node.lineno)
    return found


def definitions(word: str, root: Path = ROOT) -> set[str]:
    """Collect the files that define a function or a class called `word`, private or not."""
    found = set()
    for path in sources(root):
        for node in ast.walk(tree(path)):
            is_definition = isinstance(node, (*FUNCTIONS, ast.ClassDef))
            if is_definition and node.name.strip("_").lower() == word:
                found.add(name(path, root))
    return found


def figures(root: Path = ROOT) -> dict[str, float]:
    """Measure what HELD names; density is of all subjects together, the rest of all sources."""
    by_subject = subjects(root).values()
    total = sum(by_subject, Counter())
    everything = [*sources(root), *sorted((root / "scripts").glob("*.py"))]
    return {
        "tokens a code line": total["tokens"] / total["code"],
        "packed assignments in 1,000 lines": 1000 * total["packed"] / total["lines"],
        "comments in 100 lines": 100 * total["comments"] / total["lines"],
        "docstrings that begin askew": sum(len(askew(p)) for p in everything),
        "words of dialect": sum(len(dialect(p)) for p in everything),
        "variables called each": sum(len(variables("each", p)) for p in sources(root)),
    }


def too_long(root: Path = ROOT) -> list[str]:
    """List the subjects with more code lines than the limit, or than STILL_OVER has for them."""
    found = []
    for file, count in subjects(root).items():
        most = STILL_OVER.get(file, LIMITS["code lines of a subject"])
        if count["code"] > most:
            found.append(f"{file}: {count['code']} code lines, held at {most}")
    return found


def exercise_figures() -> dict[str, float]:
    """Measure the exercises: their lines, and their longest table of mistakes.

    All in are the checked functions, the numbers to beat and the pieces of the museum.
    """
    from ddpkit import exercises
    from ddpkit.exercises import museum
    from ddpkit.exercises.checker import Exercise

    checked = [entry for entry in vars(exercises).values() if isinstance(entry, Exercise)]
    to_beat = [word for word in vars(exercises) if word.startswith("beat_")]
    pieces = museum.pieces()
    files = [path for path in sources() if part(path) == "exercises"]
    count = sum(map(lines, files))
    of_museum = sum(lines(path) for path in files if path.stem.startswith("museum"))
    return {
        "lines an exercise, all in": count / len([*checked, *to_beat, *pieces]),
        "the same, of checked functions alone": (count - of_museum) / len(checked),
        "mistakes of an exercise, at most": max(len(entry.mistakes) for entry in checked),
    }


def outside_figures() -> dict[str, float]:
    """Measure what LIMITS_OUTSIDE names: the tests, the top folder, and two documents."""
    count = lines_by_part()
    return {
        "lines of tests for a line of ddpkit": count["tests"] / count["ddpkit"],
        "files at the top of ddpkit": len(list((ROOT / "ddpkit").glob("*.py"))),
        "words of docs/decisions.md": len(text(ROOT / "docs" / "decisions.md").split()),
        "lines of README.md": lines(ROOT / "README.md"),
    }


def worse(now: dict[str, float], limits: dict[str, float] = HELD) -> list[str]:
    """Name the figures that are worse than those held."""
    found = []
    for figure, held in limits.items():
        sign = -1 if figure in MORE_IS_BETTER else 1
        if sign * now[figure] > sign * held:
            found.append(f"{figure}: {now[figure]:.2f}, held at {held}")
    return found


def nested_comprehensions(path: Path) -> list[str]:
    """List comprehensions inside others, as file:line."""
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
    """Collect every name that this file gives by def, class or assignment, also to attributes."""
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
    """List uses of a private name that only another module gives, as 'file:line name'.

    A subclass may use its base's.
    """
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
    """List what the runtime names, in an import or a string, though it stands above it."""
    by_part = [(path.stem, part(path, root)) for path in sources(root)]
    instruments = {stem for stem, where in by_part if where == "instruments"}  # and names for them
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
    """List `SomeClass.method = ...` and setattr(SomeClass, ...), as 'file:line Class.method'."""
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
    """List the syntax in reading order, without docstring, annotations and variables' names."""
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
    """Yield (name, runs of four nodes) of every function and method that isn't small."""
    for node in ast.walk(tree(path)):
        if isinstance(node, FUNCTIONS):
            words = shape(node)
            if len(words) >= SMALL:
                yield node.name, set(zip(words, words[1:], words[2:], words[3:], strict=False))


def spelled_twice(root: Path = ROOT) -> list[str]:
    """List pairs of functions in two modules outside fast/ whose syntax is nearly the same."""
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
        if one == other or fewer < enough * more:  # sizes that differ this much can't be alike
            continue
        if len(runs & others) >= enough * len(runs | others):
            found.append(f"{name(one, root)} {called} ~ {name(other, root)} {also}")
    return found


def references_beside_the_library() -> list[str]:
    """List exercises with a reference of their own though the library has one of that name."""
    from importlib import import_module

    from ddpkit import exercises

    library = defaultdict(list)
    for path in sources():
        if part(path) in ("subjects", "instruments"):
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
    for where, count in lines_by_part().items():
        held = f", held at {RATCHET[where]:,}" if where in RATCHET else ""
        print(f"{where:>12} {count:>7,} lines{held}")
    print(told("subjects with more code lines than they may have", too_long()))
    held = HELD | HELD_EXERCISES
    for figure, now in (figures() | exercise_figures()).items():
        limit = f", limit {LIMITS[figure]}" if figure in LIMITS else ""
        print(f"{figure:>36}: {now:.4g}, held at {held[figure]}{limit}")
    for figure, now in outside_figures().items():
        print(f"{figure:>36}: {now:,.4g}, limit {LIMITS_OUTSIDE[figure]:,}")
    print("subject                      code lines  tokens a line  packed  comments in 100 lines")
    for file, count in subjects().items():
        tokens, share = count["tokens"] / count["code"], 100 * count["comments"] / count["lines"]
        print(f"{file:<29}{count['code']:>10}{tokens:>15.1f}{count['packed']:>8}{share:>23.1f}")
    everything = [*sources(), *sorted((ROOT / "scripts").glob("*.py"))]
    begun = (f"{name(path)}:{each}" for path in everything for each in askew(path))
    print(told("docstrings that begin askew", begun))
    stilted = (f"{name(path)}:{line}" for path in everything for line in dialect(path))
    print(told("words of dialect", stilted))
    stale = (f"{name(path)}: {said}" for path in sources() for said in stale_values(path))
    print(told("constants' values that docstrings have wrong", stale))
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


if __name__ == "__main__":
    main()
