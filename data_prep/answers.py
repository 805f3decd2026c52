"""The responses of a target to prompts, kept in the work folder of a build (pipeline.py) as they are finished.

    rows-0.jsonl     one row per finished prompt, appended by rank 0; likewise rows-1.jsonl, ...
    failed-0.jsonl   {"id", "reason"} of each prompt that failed in this attempt

A row counts whichever rank wrote it, so any number of ranks can resume. Failures are forgotten when the next attempt
begins, which tries those prompts again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from rich.markup import escape

from data_prep.pipeline import Build, Parts
from data_prep.progress import Advance, show_facts
from spectrain.decoding import Sampling, TargetModel
from spectrain.decoding.errors import UserError
from spectrain.decoding.loop import Emitted, check_prompt
from spectrain.stores.folder import digest, json_line
from spectrain.stores.lines import end_last_line, read_lines
from spectrain.stores.prompts import MAX_PROMPT_BYTES, Question, conversation_ids, read_prompts
from spectrain.stores.rows import ResponseManifest, write_responses
from spectrain.stores.texts import STDLIB_HELD_OUT, is_held_out, read_documents, unit_hash
from spectrain.stores.typed import from_json

log = logging.getLogger(__name__)

DECODED_TOGETHER = 1024  # prompts handed to the loop at once, at least: batches stay full and memory small
SHOWN_FAILURES = 20
STDLIB_PROMPTS = 400
STDLIB_CHARACTERS = 400  # of a prompt: with 512 new tokens it fits the bundled target, even at one token per character
STDLIB_CUTS = 3  # prompts per module
STDLIB_STRIDE = 4800  # characters, so that a response of 512 tokens ends before the next cut


@dataclass(frozen=True)
class Prompt:
    """A prompt as the target reads it."""

    number: int  # in the prompt file
    id: str
    category: str
    tokens: Sequence[int] = dataclasses.field(repr=False)


@dataclass(frozen=True)
class Answering:
    """How responses are drawn."""

    sampling: Sampling
    max_new_tokens: int
    seed: int = 0
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What the target wrote."""

    tokens: list[int]  # ends with the EOS where one was drawn
    finish_reason: str  # eos | stop | length
    retokenized: bool = False  # the server gave text only


@dataclass(frozen=True)
class AnsweredRow:
    """A line of `rows-0.jsonl`."""

    prompt: list[int]
    response: list[int]
    id: str
    category: str
    number: int
    finish_reason: str
    retokenized: bool


@dataclass(frozen=True)
class Answers:
    """Where a rank puts its answers: files that it appends to, row by row."""

    build: Build
    advance: Advance  # called with the prompts that are finished and the tokens that were drawn

    def add(self, prompt: Prompt, answer: Answer) -> None:
        """Keep an answer; once this returns, a kill does not lose it."""
        of_prompt = {name: getattr(prompt, name) for name in ("id", "category", "number")}
        of_answer = {name: getattr(answer, name) for name in ("finish_reason", "retokenized")}
        self._append("rows", vars(AnsweredRow(list(prompt.tokens), answer.tokens, **of_prompt, **of_answer)))

    def fail(self, prompt: Prompt, reason: str) -> None:
        """Note why a prompt has no answer."""
        self._append("failed", {"id": prompt.id, "reason": reason})

    def _append(self, name: str, row: dict) -> None:
        if self.build.writes:
            with (self.build.work / f"{name}-{self.build.fabric.global_rank}.jsonl").open("a") as file:
                file.write(json_line(row))
        self.advance(1, 0)


def answer_in_loop(
    prompts: Sequence[Prompt], answers: Answers, decode: Callable[..., Iterator[Emitted]], batch_size: int
) -> None:
    """Let the target answer in the decoding loop.

    `decode` is `stream` with the target, any method, and all options but those of the prompts.
    """
    together = max(DECODED_TOGETHER, 64 * batch_size)
    for start in range(0, len(prompts), together):
        group = prompts[start : start + together]
        texts, numbers = [prompt.tokens for prompt in group], [prompt.number for prompt in group]
        for step in decode(texts, prompt_numbers=numbers, batch_size=batch_size):
            answers.advance(0, len(step.tokens))
            if step.generation is not None:
                answer = Answer(step.generation.tokens, step.generation.finish_reason)
                answers.add(group[step.prompt_index], answer)


@dataclass(frozen=True)
class PromptParts(Parts):
    """The prompts of a store, each a part of its build."""

    manifest: ResponseManifest  # without counts
    questions: Sequence[Question]  # their first turns are answered
    target: TargetModel
    chat: bool | str  # see `conversation_ids`
    answering: Answering
    answer: Callable[[Sequence[Prompt], Answers], None]  # in the loop, or by a server
    allow_failed: bool  # whether the store is finished without the prompts that failed

    stage, made_before = "answer", "prompts are answered"

    @property
    def identity(self) -> dict:
        return {
            "config": self.manifest.config,
            "target_fingerprint": self.manifest.target_fingerprint,
            "tokenizer_fingerprint": self.manifest.tokenizer_fingerprint,
            "set_of_prompts": digest({"prompts": [dataclasses.astuple(question) for question in self.questions]}),
        }

    @cached_property
    def prompts(self) -> list[Prompt]:
        ids = partial(conversation_ids, self.target.tokenizer, replies=[], chat=self.chat)
        return [Prompt(number, q.id, q.category, ids(q.turns[:1])) for number, q in enumerate(self.questions)]

    @property
    def sizes(self) -> list[int]:
        return [1] * len(self.questions)

    def missing(self, build: Build) -> list[int]:
        """Return the numbers of the prompts that have no answer yet, and forget the failures."""
        later = sum(len(question.turns) > 1 for question in self.questions)
        if later:
            log.warning("%d prompts have more than one turn; the first of each is answered", later)
        for file in build.work.glob("failed-*.jsonl"):
            file.unlink()
        for file in build.work.glob("rows-*.jsonl"):
            end_last_line(file)
        done = {row["id"] for row in answered_rows(build.work)}
        return [prompt.number for prompt in self.prompts if prompt.id not in done]

    def make(self, build: Build, parts: Sequence[int], advance: Advance) -> None:
        """Have the prompts of these numbers answered; those that the target cannot read have failed."""
        answers, readable = Answers(build, advance), []
        for prompt in (self.prompts[number] for number in parts):
            try:
                check_prompt(self.target, prompt.tokens, self.answering.max_new_tokens)
                readable.append(prompt)
            except UserError as error:
                answers.fail(prompt, str(error))
        if readable:
            self.answer(readable, answers)

    def n_tokens(self, build: Build, made: Sequence[int]) -> int:
        numbers = set(made)
        return sum(len(row["response"]) for row in answered_rows(build.work) if row["number"] in numbers)

    def write_store(self, build: Build) -> None:
        """Write the store and put it in its place; UserError where prompts failed that may not be left out."""
        rows = sorted(answered_rows(build.work), key=lambda row: row["number"])
        files = sorted(file for file in build.work.glob("failed-*.jsonl") if file.stat().st_size)
        reasons = {row["id"]: row["reason"] for file in files for row in read_lines(file)}
        done = {row["id"] for row in rows}
        failed = [{"id": q.id, "reason": reasons[q.id]} for q in self.questions if q.id not in done]
        if failed and not (self.allow_failed and rows):
            shown = {escape(entry["id"]): escape(entry["reason"]) for entry in failed[:SHOWN_FAILURES]}
            more = len(failed) - len(shown)
            show_facts("prompts that failed", shown | ({"..": f"and {more:,} more"} if more else {}))
            where = files[0] if len(files) == 1 else build.work / "failed-*.jsonl"
            again = "the same command tries them again"
            advice = f"{again}, allow_failed=true finishes without them" if rows else f"see to the cause, {again}"
            raise UserError(f"{len(failed)} of {len(self.questions)} prompts failed (listed in {where}); {advice}")
        counts = {
            "prompts": len(self.questions),
            "responses": len(rows),
            "failed": len(failed),
            "tokens": sum(len(row["response"]) for row in rows),
            "retokenized": sum(row["retokenized"] for row in rows),
            "later_turns": sum(len(question.turns) - 1 for question in self.questions),
        }
        drawn = {"sampling": self.manifest.sampling, "seed": self.answering.seed}
        manifest = dataclasses.replace(self.manifest, counts=counts, failed=failed)
        write_responses(build.new_store(), (row | drawn for row in rows), manifest)
        build.publish()


def answered_rows(work: Path) -> list[dict]:
    """Return the rows of all ranks, the first of each prompt; what is damaged is answered again."""
    rows: dict[str, dict] = {}
    for file in sorted(work.glob("rows-*.jsonl")):
        for values in read_lines(file):
            with contextlib.suppress(ValueError):
                row = from_json(AnsweredRow, values)
                rows.setdefault(row.id, vars(row))
    return list(rows.values())


def read_questions(prompts: str | None, limit: int | None, max_prompt_bytes: int = MAX_PROMPT_BYTES) -> list[Question]:
    """Read the questions of a prompt file; without one, cut them from modules of the standard library.

    Those are modules that training sees as well. Cuts of a module stand apart, so that no prompt holds the text that
    another asks for. The first cuts of all modules come first, in hashed order: few prompts are of many modules.
    """
    if prompts is not None:
        return read_prompts(prompts, limit, max_prompt_bytes)
    found = []
    for document in read_documents(None):
        if is_held_out(document.id, STDLIB_HELD_OUT):
            continue
        for cut in range(STDLIB_CUTS):
            start = cut * STDLIB_STRIDE
            start = document.text.find("\n", start) + 1 if start else 0
            if (start or not cut) and len(document.text) - start > STDLIB_STRIDE // 2:
                name = f"{document.id}:{start}"
                text = document.text[start : start + STDLIB_CHARACTERS]
                found.append((cut, unit_hash(name), Question(name, "stdlib", (text,))))
    return [question for _, _, question in sorted(found, key=lambda entry: entry[:2])[: limit or STDLIB_PROMPTS]]
