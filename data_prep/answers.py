"""The responses of a target to prompts, kept in the work folder of a build (pipeline.py) as they are finished.

Each turn of a question is a prompt: the conversation so far, with the target's own replies. All first turns are
answered together, then all second ones.

    rows-0.jsonl     one row per finished prompt, appended by rank 0; likewise rows-1.jsonl, ...
    failed-0.jsonl   {"id", "reason"} of each prompt that failed in this attempt

A row counts whichever rank wrote it, so any number of ranks can resume. Failures are forgotten when the next attempt
begins, which tries those prompts again.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data_prep.pipeline import Build, Parts
from data_prep.progress import Advance, show_facts
from spectrain.data.prompts import Question, question_ids
from spectrain.data.texts import turn_id
from spectrain.decoding import Sampling
from spectrain.decoding.engine import check_prompt
from spectrain.decoding.loop import Emitted
from spectrain.errors import UserError
from spectrain.stores.files import end_last_line, json_line, read_lines
from spectrain.stores.folder import digest
from spectrain.stores.rows import ResponseManifest, write_responses
from spectrain.target import TargetModel

log = logging.getLogger(__name__)

DECODED_TOGETHER = 1024  # prompts handed to the loop at once, at least: batches stay full and memory small
SHOWN_FAILURES = 20


@dataclass(frozen=True)
class Prompt:
    """A prompt as the target reads it."""

    number: int  # of the question in its file; later turns count on behind all first ones
    id: str  # of the question, and of the turn (`turn_id`)
    category: str
    tokens: Sequence[int] = dataclasses.field(repr=False)


@dataclass(frozen=True)
class Answering:
    """How responses are drawn."""

    sampling: Sampling
    max_new_tokens: int
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What the target wrote."""

    tokens: list[int]  # ends with the EOS where one was drawn
    finish_reason: str  # eos | stop | length
    retokenized: bool = False  # the server gave text only


class TimeIsUpError(Exception):
    """The time for answers is over; those that are not finished are lost."""


@dataclass(frozen=True)
class Answers:
    """Where a rank puts its answers: files that it appends to, row by row."""

    build: Build
    advance: Advance  # called with the prompts that are finished and the tokens that were drawn
    replies: dict[str, list[int]]  # to all prompts so far, by their ids
    target: TargetModel  # whose ranks end together
    ends_s: float | None = None  # by `time.monotonic`; None: with the last prompt

    def add(self, prompt: Prompt, answer: Answer) -> None:
        """Keep an answer; once this returns, a kill does not lose it. Raise TimeIsUpError where it was the last one."""
        row = {"id": prompt.id, "category": prompt.category, "number": prompt.number, "prompt": list(prompt.tokens)}
        answered = {"finish_reason": answer.finish_reason, "retokenized": answer.retokenized}
        self._append("rows", row | {"response": answer.tokens} | answered)
        self.replies[prompt.id] = answer.tokens
        if self.ends_s is not None and self.target.agreed(time.monotonic() > self.ends_s):
            raise TimeIsUpError

    def fail(self, prompt: Prompt, reason: str) -> None:
        """Note why a prompt has no answer."""
        self._append("failed", {"id": prompt.id, "reason": reason})

    def _append(self, name: str, row: dict) -> None:
        if self.build.writes:
            own = self.build.work / f"{name}-{self.build.fabric.global_rank}.jsonl"
            with own.open("a", encoding="utf-8") as file:
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
                answers.add(group[step.request], answer)


@dataclass(frozen=True)
class PromptParts(Parts):
    """The questions of a store, each a part of its build."""

    manifest: ResponseManifest  # without counts
    questions: Sequence[Question]
    target: TargetModel
    chat: bool | str  # see `conversation_ids`
    answering: Answering
    answer: Callable[[Sequence[Prompt], Answers], None]  # in the loop, or by a server
    allow_failed: bool  # whether the store is finished without the prompts that failed
    finish_early: bool  # whether to answer no more prompts, and to store those that are answered already
    within_s: float | None = None  # after which the store is finished with those that are answered

    stage, made_before = "answer", "prompts are answered"

    @property
    def identity(self) -> dict:
        return {
            "config": self.manifest.config,
            "target_fingerprint": self.manifest.target_fingerprint,
            "tokenizer_fingerprint": self.manifest.tokenizer_fingerprint,
            "set_of_prompts": digest({"prompts": [dataclasses.astuple(question) for question in self.questions]}),
        }

    @property
    def sizes(self) -> list[int]:
        return [len(question.turns) for question in self.questions]

    def missing(self, build: Build) -> list[int]:
        """Return the numbers of the questions that lack an answer yet, and forget the failures."""
        ids = [name for question in self.questions for name in prompt_ids_of(question)]
        if len(set(ids)) < len(ids):
            twice = next(name for name, count in Counter(ids).items() if count > 1)
            raise UserError(f"two questions have the id {twice!r}, one of them as a later turn; rename one of them")
        for file in build.work.glob("failed-*.jsonl"):
            file.unlink()
        for file in build.work.glob("rows-*.jsonl"):
            end_last_line(file)
        done = {row["id"] for row in answered_rows(build.work)}
        if self.finish_early:
            if not done.intersection(ids):
                raise UserError("finish_early=true needs prompts that an earlier attempt answered; there are none yet")
            log.info("%d of %d prompts are answered; the store is finished with them", len(done), len(ids))
            return []
        return [n for n, question in enumerate(self.questions) if not done.issuperset(prompt_ids_of(question))]

    def make(self, build: Build, parts: Sequence[int], advance: Advance) -> None:
        """Have all turns of these questions answered; those that the target cannot read have failed."""
        replies = {row["id"]: row["response"] for row in answered_rows(build.work)}
        ends_s = None if self.within_s is None else time.monotonic() + self.within_s
        with suppress(TimeIsUpError):
            self._make(parts, Answers(build, advance, replies, self.target, ends_s))

    def _make(self, parts: Sequence[int], answers: Answers) -> None:
        for turn in range(max((len(self.questions[number].turns) for number in parts), default=0)):
            readable = []
            for number in parts:
                if turn >= len(self.questions[number].turns):
                    continue
                if turn_id(self.questions[number].id, turn) in answers.replies:
                    answers.advance(1, 0)  # by an earlier attempt, which did not reach the later turns
                    continue
                prompt, reason = self._prompt(number, turn, answers.replies)
                if reason:
                    answers.fail(prompt, reason)
                else:
                    readable.append(prompt)
            if readable:
                self.answer(readable, answers)

    def _prompt(self, number: int, turn: int, replies: dict[str, list[int]]) -> tuple[Prompt, str | None]:
        """Return a turn of a question as a prompt, and why the target cannot answer it, or None."""
        question, tokens, reason = self.questions[number], [], None
        before = prompt_ids_of(question)[:turn]
        if all(name in replies for name in before):
            own = [replies[name] for name in before]
            tokens = question_ids(self.target.tokenizer, question, own, self.chat)
            try:
                check_prompt(self.target, tokens, self.answering.max_new_tokens)
            except UserError as error:
                reason = str(error)
        else:
            reason = "an earlier turn has no answer"
        number += turn * len(self.questions)
        return Prompt(number, turn_id(question.id, turn), question.category, tokens), reason

    def n_tokens(self, build: Build, made: Sequence[int]) -> int:
        ids = {name for number in made for name in prompt_ids_of(self.questions[number])}
        return sum(len(row["response"]) for row in answered_rows(build.work) if row["id"] in ids)

    def write_store(self, build: Build) -> None:
        """Write the store and put it in its place; UserError where prompts failed that may not be left out."""
        rows = sorted(answered_rows(build.work), key=lambda row: row["number"])
        reasons = {row["id"]: row["reason"] for file in build.work.glob("failed-*") for row in read_lines(file)}
        done = {row["id"] for row in rows}
        asked = [name for question in self.questions for name in prompt_ids_of(question)]
        ends_early = self.finish_early or self.within_s is not None
        ids = [name for name in asked if name in done or name in reasons] if ends_early else asked
        if not ids:
            raise UserError("no prompt was answered in time; give more minutes=")
        failed = [{"id": name, "reason": reasons[name]} for name in ids if name not in done]
        if failed and not (self.allow_failed and rows):
            shown = {entry["id"]: entry["reason"] for entry in failed[:SHOWN_FAILURES]}
            more = len(failed) - len(shown)
            show_facts("prompts that failed", shown | ({"..": f"and {more:,} more"} if more else {}))
            again = "the same command tries them again"
            advice = f"{again}, allow_failed=true finishes without them" if rows else f"see to the cause, {again}"
            raise UserError(
                f"{len(failed)} of {len(ids)} prompts failed (listed in {build.work}/failed-*.jsonl); {advice}"
            )
        counts = {
            "prompts": len(ids),
            "responses": len(rows),
            "failed": len(failed),
            "unanswered": len(asked) - len(ids),
            "tokens": sum(len(row["response"]) for row in rows),
            "retokenized": sum(row["retokenized"] for row in rows),
            "later_turns": len(set(ids) - {question.id for question in self.questions}),
        }
        drawn = {"sampling": self.manifest.sampling, "seed": self.answering.seed}
        manifest = dataclasses.replace(self.manifest, counts=counts, failed=failed)
        write_responses(build.new_store(), (row | drawn for row in rows), manifest)
        build.publish()


def prompt_ids_of(question: Question) -> list[str]:
    """Return the ids of a question's turns, each a prompt of its own."""
    return [turn_id(question.id, turn) for turn in range(len(question.turns))]


def answered_rows(work: Path) -> list[dict]:
    """Return the rows of all ranks, the first of each prompt; a line that a kill cut off is answered again."""
    rows: dict[str, dict] = {}
    for file in sorted(work.glob("rows-*.jsonl")):
        for row in read_lines(file):
            rows.setdefault(row["id"], row)
    return list(rows.values())
