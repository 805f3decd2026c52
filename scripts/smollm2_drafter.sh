#!/usr/bin/env bash
# A drafter for SmolLM2-135M-Instruct as the one that comes with spectrain, from its prompts to the exported folder, and
# a datastore of the answers.
#
#   PROMPTS="gsm8k.jsonl p3.jsonl roleplay.jsonl" scripts/smollm2_drafter.sh
#
# PROMPTS are files of questions whose licences permit it; prompts about code are added. On two cores
# it takes about two hours: half of it for the responses, an eighth for the activations, the rest for the training.
# After an interruption the same command goes on. It needs pip install -e '.[gguf]'.
#
# INIT=<folder> trains an exported drafter further, on the answers to other prompts than before:
#
#   INIT=checkpoints/smollm2-135m-spire STEPS=940 LR=1.5e-3 WORK=runs/more OUT=checkpoints/more STORE=checkpoints/more-answers \
#       PROMPTS=... scripts/smollm2_drafter.sh
set -euo pipefail
PROMPTS=${PROMPTS:?give the .jsonl files of questions}
RANKS=${RANKS-2}
WORK=${WORK-runs/smollm2}
PYTHON=${PYTHON-python}
INIT=${INIT-pruned}
from=(init="$INIT")
[ "$INIT" = pruned ] && from+=(draft_vocab=24576)   # an exported drafter has its tokens
export OMP_NUM_THREADS=${OMP_NUM_THREADS-1}   # of each rank

mkdir -p "$WORK"
# The questions of the files, and prompts about functions of the standard library (of modules that no training leaves out)
# and small programs; some of these resemble those of HumanEval.
# shellcheck disable=SC2086  # several files
$PYTHON - "$WORK/prompts.jsonl" $PROMPTS << 'END'
from __future__ import annotations

import ast
import json
import random
import sys
import textwrap
from collections.abc import Iterator

from spectrain.data.prompts import Question, read_prompts
from spectrain.data.texts import STDLIB_HELD_OUT, is_held_out, read_documents, unit_hash

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

shuffled = random.Random(0)
questions = [question for file in sys.argv[2:] for question in read_prompts(file)]
for own, most in ((list(code_questions()), 3000), (list(task_questions()), 2500)):
    shuffled.shuffle(own)
    questions += own[:most]
shuffled.shuffle(questions)  # the first ones are a sample of all
with open(sys.argv[1], "w", encoding="utf-8") as file:
    for number, q in enumerate(q for q in questions if sum(map(len, q.turns)) <= 600):
        file.write(json.dumps({"question_id": number, "category": q.category, "turns": q.turns}) + "\n")
END
half=$(($(wc -l < "$WORK/prompts.jsonl") / 2))
head -n "$half" "$WORK/prompts.jsonl" > "$WORK/sampled.jsonl"
tail -n +$((half + 1)) "$WORK/prompts.jsonl" > "$WORK/greedy.jsonl"

store() {   # name, command, options: unless it is finished
    [ -e "$WORK/$1/manifest.json" ] ||
        $PYTHON -m torch.distributed.run --nproc-per-node "$RANKS" -m "$2" target=smollm2 out="$WORK/$1" "${@:3}"
}
store own-sampled data_prep.responses prompts="$WORK/sampled.jsonl" limit="${SAMPLED-2800}" sampling=t1 \
    max_new_tokens=192 batch_size=32
store own-greedy data_prep.responses prompts="$WORK/greedy.jsonl" limit="${GREEDY-1300}" sampling=greedy \
    max_new_tokens=192 batch_size=32
[ -e "${STORE-checkpoints/smollm2-own-answers}/manifest.json" ] ||
    $PYTHON -m data_prep.datastore corpus=responses:"$WORK/own-sampled:$WORK/own-greedy" target=smollm2 keep=null \
        perplexity_filter=false out="${STORE-checkpoints/smollm2-own-answers}"
store activations data_prep.activations corpus=responses:"$WORK/own-sampled:$WORK/own-greedy" 'layers=[27,28,29]' \
    row_tokens=512 document_mask=true
$PYTHON -m spectrain.train +exp=spire target=smollm2 data=offline data.path="$WORK/activations" data.batch_size=4 \
    data.val_rows=32 trainer=ddp trainer.accelerator=cpu trainer.devices="$RANKS" "${from[@]}" max_steps="${STEPS-1950}" \
    optimizer.lr="${LR-3e-3}" optimizer.warmup_steps=60 trainer.val_check_interval="${VALIDATE-650}" select.every=0 tau.contexts=32 \
    'tau.context_tokens=[96,160]' run_dir="$WORK/spire" out="${OUT-checkpoints/smollm2-135m-spire}"
