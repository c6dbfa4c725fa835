"""The project's own files agree with one another."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from ddpkit import HangError
from ddpkit.runtime import machine

pytest.importorskip("nbformat", reason="Jupyter isn't installed")
yaml = pytest.importorskip("yaml")
record_ring = pytest.importorskip("record_ring")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def tracked() -> set[str]:
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if git.returncode:
        pytest.skip("not a git checkout")
    return set(git.stdout.splitlines())


def test_the_picture_in_the_readme_is_that_of_a_real_run():
    assert (ROOT / "docs/ring.svg").read_text(encoding="utf-8") == record_ring.record()


def test_conda_installs_what_make_installs():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *conda, pip = environment["dependencies"]
    assert conda == [f"python{PROJECT['requires-python']}", "pip"]
    assert pip == {"pip": ["--constraint constraints.txt", "--editable .[course,test]"]}
    install = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert '--constraint constraints.txt --editable ".[course,test]"' in install


def test_every_package_is_pinned_for_every_system():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    names = set(re.findall(r"^([\w.-]+)==", pins, re.MULTILINE))
    asked = chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    wanted = {re.match(r"[\w.-]+", each)[0] for each in asked}
    assert wanted | {"appnope", "colorama", "pywinpty"} <= names  # macOS's, Windows'
    assert not [name for name in names if name.startswith(("cuda-", "nvidia-"))]


def test_the_pinned_torch_is_in_range():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (pin,) = re.findall(r"^torch==([\d.]+)$", pins, re.MULTILINE)
    assert not machine.untried_torch(pin)


def test_pip_and_the_doctor_ask_for_the_same_versions():
    from ddpkit import doctor

    assert machine.torch_requirement() in PROJECT["dependencies"]
    assert PROJECT["requires-python"] == f">={'.'.join(map(str, doctor.OLDEST_PYTHON))}"


def claimed_tree() -> dict[str, str]:
    """{path: description} of the README's tree; a folder without children stands for all in it."""
    (block,) = re.findall(r"```text\n(README\.md .*?)```", README, re.DOTALL)
    tree, folders = {}, []
    for line in block.splitlines():
        indent, name, words = re.fullmatch(r"( *)(\S+)(?: {2,}(.*))?", line).groups()
        del folders[len(indent) // 2 :]
        tree["".join(folders) + name] = words or ""
        if name.endswith("/"):
            folders.append(name)
    return tree


def test_the_readme_lists_exactly_the_files_there_are():
    tree, files = claimed_tree(), tracked()
    not_listed = set(files)
    for name, says in tree.items():
        if any(other != name and other.startswith(name) for other in tree):
            continue  # a folder whose files stand below it
        assert says or name.endswith("__init__.py"), f"README says nothing about {name}"
        folder = name.endswith("/")
        found = {file for file in files if folder and file.startswith(name)} or files & {name}
        assert found, f"README lists {name}, which is not there"
        not_listed -= found
    assert not_listed == set()


def test_the_readme_lists_all_notebooks():
    listed = re.findall(r"^\| \d\d \| \[.+\]\(notebooks/([\w.]+\.ipynb)\) \|", README, re.MULTILINE)
    assert listed == sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_links_in_the_readme_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:|\.\./\.\./)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_example_in_the_readme_runs_as_shown(tmp_path):
    program, *_ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (shown,) = re.findall(r"```text\n((?!README).*?)```", README, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(program)
    with pytest.raises(HangError) as told:
        runpy.run_path(str(script), run_name="__main__")
    assert without_times(shown) in without_times(f"HangError: {told.value}")


def without_times(text: str) -> str:
    return re.sub(r"\d+(\.\d+)? s\b", "TIME", "\n".join(map(str.rstrip, text.splitlines()))).strip()


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """As from a shell: what the make that runs these tests was told stays out of it."""
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    inherited = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON", "TORCH_INDEX")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    return subprocess.run(["make", *arguments], check=False, **options)


@pytest.mark.skipif(os.name == "nt", reason="the pretended Python is a shell script")
def test_make_refuses_an_old_python(tmp_path):
    """With a clear sentence, before it installs anything."""
    pretend = "import sys; sys.version_info = (3, 9, 0); sys.version = '3.9.0'; exec(sys.argv[1])"
    old = tmp_path / "python3.9"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{pretend}" "$2"\n')
    old.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    done = make(tmp_path, "test", f"PYTHON={old}")
    assert done.returncode
    assert "needs Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_make_takes_torch_from_where_it_is_told():
    plan = ("--dry-run", "--always-make", ".venv/ready")
    assert "--index-url" not in make(ROOT, *plan).stdout
    told = "pip install --index-url https://x --no-deps --constraint constraints.txt torch\n"
    assert told in make(ROOT, *plan, "TORCH_INDEX=https://x").stdout
