"""Write the prompts whose answers a chat model's drafters are trained on: those of files, and some about stdlib code.

    python scripts/chat_prompts.py gsm8k.jsonl p3.jsonl roleplay.jsonl --out prompts.jsonl
    python -m data_prep.responses prompts=prompts.jsonl target=<folder> source=loop batch_size=32

Up to `--code` functions of Python's standard library that have a docstring and belong to no held-out module become one
prompt each: to complete it, to write it by its description, to explain it, or a conversation of two turns about it. Up
to `--tasks` prompts ask for one of TASKS in one of LANGUAGES; some of these tasks resemble those of HumanEval. All
prompts are shuffled, so that the first ones are a sample of all. Longer prompts than `--most-characters` are left out,
and the script says how many.
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
LANGUAGES = ("Python", "JavaScript", "Java", "C++", "C", "C#", "Go", "Ruby", "PHP", "Rust", "TypeScript", "Kotlin")
TASKS = (
    "reverses a string",
    "checks whether a number is prime",
    "prints the first n Fibonacci numbers",
    "computes the factorial of a number",
    "sorts a list of numbers without a library function",
    "merges two sorted lists into one sorted list",
    "removes duplicates from a list and keeps its order",
    "counts how often each word occurs in a text",
    "finds the longest word of a sentence",
    "tells whether a word is a palindrome",
    "tells whether two words are anagrams",
    "finds the largest and the smallest number of a list",
    "computes the sum of all even numbers of a list",
    "computes mean, median and mode of a list",
    "converts Celsius to Fahrenheit and back",
    "converts a decimal number to binary",
    "finds the greatest common divisor of two numbers",
    "searches a sorted list by binary search",
    "implements a stack with push and pop",
    "implements a queue with two stacks",
    "implements a linked list with insert and delete",
    "implements a binary search tree with insert and lookup",
    "traverses a graph breadth first",
    "finds the shortest path in a weighted graph",
    "multiplies two matrices",
    "transposes a matrix",
    "rotates a list by k places",
    "flattens a nested list",
    "groups a list of records by one of their fields",
    "reads a CSV file and prints the average of a column",
    "reads a JSON file and prints its keys",
    "writes a list of names to a file, one per line",
    "counts lines, words and characters of a file",
    "replaces all vowels of a text by a star",
    "capitalizes the first letter of each word",
    "checks whether the brackets of an expression match",
    "evaluates an expression in postfix notation",
    "validates an email address",
    "validates a password by length, digits and symbols",
    "generates a random password of a given length",
    "simulates throwing two dice a thousand times",
    "computes the number of days between two dates",
    "prints a calendar of a month",
    "prints a multiplication table",
    "prints a pyramid of stars",
    "plays rock, paper, scissors against the user",
    "lets the user guess a number",
    "keeps a list of tasks that can be added, done and removed",
    "models a bank account with deposit, withdraw and balance",
    "models a car with a make, a model and a year",
    "models shapes that know their area, by inheritance",
    "caches the results of a slow function",
    "retries a request up to three times",
    "downloads a page and prints its title",
    "starts a small web server that answers with the time",
    "inserts a row into a database and reads it back",
    "encrypts a text by the Caesar cipher",
    "compresses a string by run lengths",
    "finds all permutations of a string",
    "solves the towers of Hanoi",
)
OTHER_TASKS = (
    "Write an SQL query that lists the five customers with the highest total of orders.",
    "Write an SQL query that finds employees who earn more than the average of their department.",
    "Write an SQL statement that creates a table of books with title, author, year and price.",
    "Write an SQL query that counts the orders of each month of a year.",
    "Write a CSS rule that centres a box on the page and gives it rounded corners.",
    "Write an HTML form with a name, an email address and a button, and style it with CSS.",
    "Write an HTML page with a header, a list of links and a footer.",
    "Write a CSS selector for all links inside a list of the class menu.",
    "Write a regular expression that matches phone numbers, and explain its parts.",
    "Write a regular expression that matches dates such as 2024-05-31.",
    "Write a shell script that renames all files of a folder to lower case.",
    "Write a shell script that backs up a folder to an archive with the date in its name.",
    "Write a Dockerfile for a small web application, and explain each line.",
    "Write a jQuery call that hides all elements of the class note.",
    "Explain the difference between a list and a tuple in Python.",
    "Explain what a pointer is in C, with an example.",
    "Explain the difference between an interface and an abstract class.",
    "Explain recursion to a beginner, with an example.",
    "Explain what REST is, and name its main rules.",
    "What is the time complexity of quicksort, and why?",
    "What does the keyword async do in JavaScript?",
    "How does garbage collection work in Java?",
    "Which data structure would you use for a phone book, and why?",
    "Name five good habits for writing readable code.",
)
REQUESTS = (
    "Write a {} function that {}.",
    "Create a {} program that {}.",
    "Show me {} code that {}, and explain how it works.",
    "Write a {} program that {}. Add comments and an example of its use.",
    "How would you write {} code that {}?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help=".jsonl, in a format of spectrain.bench")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most-characters", type=int, default=1500)
    parser.add_argument("--code", type=int, default=3000, help="prompts about functions of the standard library")
    parser.add_argument("--tasks", type=int, default=2500, help="prompts that ask for a small program")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    questions = [question for file in options.files for question in read_prompts(file)]
    shuffled = random.Random(options.seed)
    about_code = list(code_questions())
    shuffled.shuffle(about_code)
    questions += about_code[: options.code]
    tasks = list(task_questions())
    shuffled.shuffle(tasks)
    questions += tasks[: options.tasks]
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


def task_questions() -> Iterator[Question]:
    """Yield a question for each task, language and wording, and those that name their language themselves."""
    for number, text in enumerate(OTHER_TASKS):
        yield Question(f"other-task-{number}", "task", (text,))
    for task in TASKS:
        for language in LANGUAGES:
            for number, wording in enumerate(REQUESTS):
                yield Question(f"{language}:{number}:{task}", "task", (wording.format(language, task),))


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
