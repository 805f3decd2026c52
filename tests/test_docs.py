"""Every command that README and docs/ show has options that exist. Links and pictures lead somewhere."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest

from spectrain.cli import composed
from spectrain.config import COMMANDS, options_of
from spectrain.serving import llm

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(
    rf"(?:-m (?:spectrain|data_prep)\.(?=\w)|(?:^ *|`)spectrain (?=(?:{'|'.join(COMMANDS)})\b))(\w+)((?: [^|`#\n]*)?)",
    re.MULTILINE,
)


def commands() -> list[str]:
    """What stands behind `python -m`, once each, without what a reader fills in (`...`)."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        found += [f"{name} {rest.strip()}" for name, rest in COMMAND.findall(text)]
    lines = {re.sub(r"<[^>]*>", "x", line) for line in found if "..." not in line.replace('"..."', "")}
    return sorted(line for line in lines if "echo" not in line)  # the method that docs/design.md adds


@pytest.mark.parametrize("line", commands())
def test_commands_have_options_that_exist(line):
    name, *arguments = shlex.split(line)
    arguments = [a for a in arguments if "=" in a and not is_sweep(a) and "${hydra:" not in a]
    if name == "generate" and not any(a.startswith("prompt=") for a in arguments):
        arguments.append("prompt=x")
    options_of(name, composed(name, *arguments))


def is_sweep(argument: str) -> bool:
    """`init=pruned,random`, which only -m takes."""
    return "," in argument and not re.search(r"[\[{\"]", argument)


def test_python_examples_run(chatty, monkeypatch, capsys):
    monkeypatch.setattr(llm, "target_path", lambda name: str(chatty) if name == "smollm2" else name)
    monkeypatch.setattr(llm, "NEW_TOKENS", 16)
    page = (ROOT / "docs" / "python.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {})
    assert len(capsys.readouterr().out) > 100
    taken = re.search(r"\| `LLM\((.*?)\)`", page)[1].split(", ")
    assert [part.split("=")[0].strip("*") for part in taken if part != "*"] == [*inspect.signature(llm.LLM).parameters]
    assert [name for name in llm.Options.__annotations__ if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, (target, slugs)


def test_pages_stay_short():
    texts = {page.name: page.read_text() for page in PAGES}
    assert len(texts.pop("README.md").splitlines()) <= 130
    assert sum(len(text.split()) for text in texts.values()) <= 32_000
    assert sum(len(text.splitlines()) for text in texts.values()) <= 2_500


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_cells_of_tables_stay_short(page):
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    assert [cell for row in rows for cell in row.split("|") if len(cell.strip()) > 300] == []


def test_pages_and_results_that_code_names_exist():
    files = [file for folder in ("spectrain", "data_prep", "scripts", "conf") for file in (ROOT / folder).rglob("*.*")]
    texts = [file.read_text() for file in files if file.suffix in (".py", ".yaml", ".slurm", ".sh")]
    named = {name for text in texts for name in re.findall(r"docs/[\w/]+\.(?:md|json|svg)", text)}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
