"""The questions that methods are measured on, and answers of a target to them, as token ids.

Questions come from a prompt file, or are held-out modules of the Python standard library. Answers are known texts on
which `spectrain.tune` simulates decoding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint, generate
from spectrain.decoding.loop import check_prompt
from spectrain.errors import UserError, check_whole
from spectrain.measure.simulation import Text
from spectrain.stores.lines import RowFile
from spectrain.stores.prompts import MAX_PROMPT_BYTES, Question, conversation_ids, json_rows, read_prompts
from spectrain.stores.texts import STDLIB_HELD_OUT, is_held_out, read_documents

STDLIB_QUESTIONS = 20
STDLIB_CHARACTERS = 1200  # of a module, to be continued
DECODED_TOGETHER = 8  # rows


def read_questions(prompts: str | None, limit: int | None, max_prompt_bytes: int = MAX_PROMPT_BYTES) -> list[Question]:
    """Read the first `limit` questions of a prompt file; without a file, of the standard library (20 by default)."""
    if prompts is not None:
        return read_prompts(prompts, limit, max_prompt_bytes)
    if limit is not None:
        check_whole("limit", limit, 1)
    documents = [d for d in read_documents(None) if is_held_out(d.id, STDLIB_HELD_OUT)]
    long_enough = [d for d in documents if len(d.text) > 2 * STDLIB_CHARACTERS]
    chosen = long_enough[: limit or STDLIB_QUESTIONS]
    return [Question(d.id, "stdlib", (d.text[:STDLIB_CHARACTERS],)) for d in chosen]


def name_of(prompts: str | None) -> str:
    """Return the name of the questions of `read_questions` in results."""
    return Path(prompts).name if prompts else "held-out modules of the Python standard library"


def digest(questions: Sequence[Question]) -> str:
    """Hash the questions: a resumed run must have the same."""
    return hashlib.sha256(json.dumps([asdict(q) for q in questions]).encode()).hexdigest()[:16]


def prompt_ids(
    questions: Sequence[Question], target: TargetModel, chat: str | bool, max_new_tokens: int
) -> dict[str, list[int]]:
    """Tokenize each question's first turn, by its id. Raises UserError where one does not fit the target."""
    found = {}
    for question in questions:
        found[question.id] = conversation_ids(target.tokenizer, question.turns[:1], [], chat)
        check_prompt(target, found[question.id], max_new_tokens, f"prompt {question.id}")
    return found


@dataclass(frozen=True)
class Answer:
    """A line of `responses.jsonl`."""

    id: str
    prompt: list[int]
    response: list[int]
    target: str  # fingerprint
    sampling: str


def write_answers(
    target: TargetModel,
    drafter: Drafter,
    prompts: Mapping[str, list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    file: Path,
) -> None:
    """Answer the prompts that `file` lacks. Answers follow the target's distribution, whatever the drafter is."""
    answers, writer = RowFile(file, Answer), (fingerprint(target.model, target.tokenizer), sampling.describe())
    done = {answer.id for answer in answers.rows}
    todo = [(number, name) for number, name in enumerate(prompts) if name not in done]
    for start in track(range(0, len(todo), DECODED_TOGETHER), "responses", console=Console(stderr=True)):
        numbers, names = zip(*todo[start : start + DECODED_TOGETHER], strict=True)
        asked, options = [prompts[name] for name in names], {"seed": seed, "batch_size": DECODED_TOGETHER}
        found = generate(target, drafter, asked, max_new_tokens, sampling, prompt_numbers=numbers, **options)
        for name, generation in zip(names, found, strict=True):
            answers.append(Answer(name, prompts[name], generation.tokens, *writer))


def read_answers(
    file: Path, target: TargetModel, sampling: Sampling | None = None, max_new_tokens: int | None = None, least: int = 1
) -> list[Text]:
    """Read the answers of at least two tokens, of which `least` are needed, from a file of `write_answers`.

    Raises UserError where a row has no token ids of the target's vocabulary, or another target, `sampling` or
    `max_new_tokens` has written it; None: these are not checked.
    """
    if not file.is_file():
        raise UserError(f"responses={file} does not exist; give responses.jsonl of a run of spectrain.tune")
    expected, texts = {}, []
    if sampling is not None:
        expected = {"target": fingerprint(target.model, target.tokenizer), "sampling": sampling.describe()}
    for number, row in json_rows(file, f"responses={file}"):
        where = f"responses={file} row {number}"
        text = Text(row.get("prompt"), row.get("response"))
        for ids in (text.prompt, text.response):
            if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < target.vocab_size for i in ids):
                raise UserError(f"{where} has no prompt and response as token ids of this target; let tune write them")
        for name, value in expected.items():
            if row.get(name, value) != value:
                raise UserError(f"{where} was written with {name} {row[name]}, not {value}; give the same {name}")
        if len(text.response) < 2 or not text.prompt:
            continue
        texts.append(text)
        if max_new_tokens is not None:
            check_prompt(target, text.prompt, max_new_tokens, where)
            n_tokens, ended = len(text.response), text.response[-1] in target.eos_ids
            if n_tokens > max_new_tokens or (n_tokens < max_new_tokens and not ended):
                raise UserError(
                    f"{where} has a response of {n_tokens} tokens, which max_new_tokens={max_new_tokens} does not "
                    "give; give the max_new_tokens that it was written with"
                )
    if len(texts) < least:
        raise UserError(f"there are {len(texts)} responses of two tokens or more, not {least}; give more prompts")
    return texts
