"""Write the prompts whose answers a chat model's drafters are trained on: those of files, and some about stdlib code.

    python scripts/chat_prompts.py gsm8k.jsonl p3.jsonl roleplay.jsonl --out prompts.jsonl
    python -m data_prep.responses prompts=prompts.jsonl target=<folder> source=loop batch_size=32

Every function of Python's standard library that has a docstring and belongs to no held-out module becomes one prompt:
to complete it, to write it by its description, to explain it, or a conversation of two turns about it. All prompts
are shuffled, so that the first ones are a sample of all. Longer prompts than `--most-characters` are left out, and the
script says how many.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from spectrain.stores.prompts import Question, read_prompts
from spectrain.stores.texts import STDLIB_HELD_OUT, is_held_out, read_documents, unit_hash

SECOND_TURNS = (
    "Write three unit tests for it.",
    "Rewrite it with type hints and a shorter docstring.",
    "Now explain it step by step to a beginner.",
    "What can go wrong when it is called? Show an example.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help=".jsonl, in a format of spectrain.bench")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most-characters", type=int, default=1500)
    parser.add_argument("--code", type=int, default=3000, help="prompts about functions of the standard library")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    questions = [question for file in options.files for question in read_prompts(file)]
    shuffled = random.Random(options.seed)
    about_code = list(code_questions())
    shuffled.shuffle(about_code)
    questions += about_code[: options.code]
    shuffled.shuffle(questions)
    kept = [q for q in questions if sum(map(len, q.turns)) <= options.most_characters]
    with options.out.open("w", encoding="utf-8") as file:
        for number, q in enumerate(kept):
            file.write(json.dumps({"question_id": number, "category": q.category, "turns": q.turns}) + "\n")
    print(f"{len(questions) - len(kept)} prompts were too long; {options.out} holds {len(kept)}:")
    for category, count in Counter(q.category for q in kept).most_common():
        print(f"  {count:6} {category}")


def code_questions() -> Iterator[Question]:
    """Yield a question about each documented function of the modules that no training leaves out."""
    for document in read_documents(None):
        if is_held_out(document.id, STDLIB_HELD_OUT):
            continue
        try:
            tree = ast.parse(document.text)
        except SyntaxError:  # modules of tests hold some on purpose
            continue
        for node in ast.walk(tree):
            doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if doc and len(doc) > 40:
                identity = f"{document.id}:{node.name}"
                yield Question(identity, "stdlib", turns_about(node, doc, document.text, unit_hash(identity)))


def turns_about(node: ast.FunctionDef, doc: str, source: str, chance: float) -> tuple[str, ...]:
    """Return the user turns of a question about a function; `chance` in [0, 1) chooses its kind."""
    whole = textwrap.dedent(ast.get_source_segment(source, node, padded=True) or "")
    head = f'def {node.name}({ast.unparse(node.args)}):\n    """{doc}"""\n'
    described = " ".join(doc.split("\n\n")[0].split())
    written = f"Write a Python function `{node.name}({ast.unparse(node.args)})` that does this: {described}"
    if chance < 0.3:
        return (head,)
    if chance < 0.45:
        return (f"Complete this Python function.\n\n{head}",)
    if chance < 0.65:
        return (written,)
    if chance < 0.85:
        return (f"Explain what this Python function does.\n\n{whole}",)
    return (written, SECOND_TURNS[int(chance * 1e6) % len(SECOND_TURNS)])


if __name__ == "__main__":
    main()
