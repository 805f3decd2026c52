"""The making of a store of responses: what is left, who answers it, and what becomes of it (docs/responses.md)."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from lightning import Fabric
from rich.markup import escape
from rich.table import Table

from data_prep.progress import TokenProgress, console
from data_prep.ranks import decided
from data_prep.response_server import AnswerReader, CompletionServer, completion_payload
from data_prep.response_work import (
    Answer,
    Answers,
    Job,
    Prompt,
    answered_rows,
    failed_files,
    failures,
    forget_failures,
)
from spectrain.decoding import Drafter, Generation, TargetModel, fingerprint, generate, tokenizer_fingerprint
from spectrain.decoding.errors import UserError
from spectrain.decoding.loop import check_prompt
from spectrain.stores import work_folder
from spectrain.stores.prompts import Question, conversation_ids
from spectrain.stores.responses import KIND, ResponseManifest, write_responses

log = logging.getLogger(__name__)

DECODED_TOGETHER = 1024  # prompts handed to the loop at once, at least: batches stay full and memory small
SHOWN_FAILURES = 20

OnTokens = Callable[[int], None]  # (how many)
OnAnswer = Callable[[Prompt, Answer], None]
OnFailure = Callable[[Prompt, str], None]  # (prompt, reason)


class Source(Protocol):
    """Who answers."""

    def answer(
        self, job: Job, prompts: Sequence[Prompt], on_tokens: OnTokens, on_answer: OnAnswer, on_failure: OnFailure
    ) -> None:
        """Answers all prompts, and hands each answer or failure on as it comes."""


@dataclass(frozen=True)
class ByLoop:
    """The target answers in the decoding loop, with any method."""

    target: TargetModel
    drafter: Drafter
    batch_size: int
    verification: str = "token"

    def answer(
        self, job: Job, prompts: Sequence[Prompt], on_tokens: OnTokens, on_answer: OnAnswer, on_failure: OnFailure
    ) -> None:
        together = max(DECODED_TOGETHER, 64 * self.batch_size)
        for start in range(0, len(prompts), together):
            self._answer(job, prompts[start : start + together], on_tokens, on_answer)

    def _answer(self, job: Job, prompts: Sequence[Prompt], on_tokens: OnTokens, on_answer: OnAnswer) -> None:
        def on_finished(index: int, generation: Generation) -> None:
            on_answer(prompts[index], Answer(generation.tokens, generation.finish_reason))

        generate(
            self.target,
            self.drafter,
            [prompt.tokens for prompt in prompts],
            job.max_new_tokens,
            job.sampling,
            seed=job.seed,
            prompt_numbers=[prompt.number for prompt in prompts],
            batch_size=self.batch_size,
            stop_strings=job.stop_strings,
            verification=self.verification,
            on_tokens=lambda index, tokens, sources: on_tokens(len(tokens)),
            on_finished=on_finished,
        )


@dataclass(frozen=True)
class ByServer:
    """A server answers; the target lends its tokenizer."""

    server: CompletionServer
    target: TargetModel

    def answer(
        self, job: Job, prompts: Sequence[Prompt], on_tokens: OnTokens, on_answer: OnAnswer, on_failure: OnFailure
    ) -> None:
        target = self.target
        reader = AnswerReader(target.tokenizer, target.vocab_size, target.eos_ids, job.max_new_tokens, job.stop_strings)

        def keep(prompt: Prompt, answer: Answer) -> None:
            on_tokens(len(answer.tokens))
            on_answer(prompt, answer)

        self.server.answer(prompts, lambda prompt: completion_payload(prompt, job), reader, keep, on_failure)


def build(job: Job, target: TargetModel, source: Source, fabric: Fabric) -> float:
    """Answers what is not answered yet and, where that is all, puts the store in its place. All ranks call it together.

    Returns:
        Tokens/s of what was answered now.

    Raises:
        UserError: the work folder is of other responses, the server cannot be reached, or prompts failed.
    """
    manifest = ResponseManifest(
        target=job.target,
        target_fingerprint=fingerprint(target.model, target.tokenizer),
        tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
        sampling=dataclasses.asdict(job.sampling),
        max_new_tokens=job.max_new_tokens,
        config=job.config | ({"model": job.served_model} if job.served_model else {}),
        counts={},
    )
    prompts = encode(target, job.questions, job.chat)
    done = decided(fabric, partial(begin, job, manifest))
    if done and fabric.is_global_zero:
        log.info("%d of %d prompts are answered already", len(done), len(prompts))
    todo = [prompt for prompt in prompts if prompt.id not in done]
    mine = todo[fabric.global_rank :: fabric.world_size] if job.ranks_share else todo
    start_s = time.monotonic()
    try:
        with Answers(job.work, fabric.global_rank, writes=fabric.is_global_zero or job.ranks_share) as answers:
            answer(job, target, source, mine, answers, shown=fabric.is_global_zero)
    except BaseException:
        if fabric.world_size == 1 and not any(file.stat().st_size for file in job.work.glob("*.jsonl")):
            work_folder.empty(job.work)  # nothing was begun
        raise
    fabric.barrier()
    elapsed_s = time.monotonic() - start_s
    n_tokens = decided(fabric, partial(finish, job, manifest))
    return (n_tokens - sum(done.values())) / max(elapsed_s, 1e-9)


def encode(target: TargetModel, questions: Sequence[Question], chat: bool | None) -> list[Prompt]:
    """The questions' first turns as the target reads them."""
    return [
        Prompt(number, q.id, q.category, conversation_ids(target.tokenizer, q.turns[:1], [], chat))
        for number, q in enumerate(questions)
    ]


def begin(job: Job, manifest: ResponseManifest) -> dict[str, int]:
    """Opens the work folder. Returns the ids that are answered there, with the tokens of each.

    Raises:
        UserError: other responses were begun there.
    """
    later = sum(len(question.turns) > 1 for question in job.questions)
    if later:
        log.warning("%d prompts have more than one turn; the first of each is answered", later)
    identity = {
        "config": json.loads(json.dumps(manifest.config)),
        "target_fingerprint": manifest.target_fingerprint,
        "tokenizer_fingerprint": manifest.tokenizer_fingerprint,
        "set_of_prompts": work_folder.digest({"prompts": [dataclasses.astuple(q) for q in job.questions]}),
    }
    work_folder.resume(job.work, identity, job.fresh)
    work_folder.begin(job.work, identity, job.fresh)
    forget_failures(job.work)
    return {row["id"]: len(row["response"]) for row in answered_rows(job.work)}


def answer(
    job: Job, target: TargetModel, source: Source, prompts: Sequence[Prompt], answers: Answers, shown: bool
) -> None:
    """Has these prompts answered, each into its file as it is finished; what the target cannot read has failed."""
    with TokenProgress("answer", len(prompts), shown) as progress:

        def keep(prompt: Prompt, given: Answer) -> None:
            answers.add(prompt, given)
            progress.advance(1, 0)

        def fail(prompt: Prompt, reason: str) -> None:
            answers.fail(prompt, reason)
            progress.advance(1, 0)

        readable = []
        for prompt in prompts:
            try:
                check_prompt(target, prompt.tokens, job.max_new_tokens)
                readable.append(prompt)
            except UserError as error:
                fail(prompt, str(error))
        if readable:
            source.answer(job, readable, lambda n_tokens: progress.advance(0, n_tokens), keep, fail)


def finish(job: Job, manifest: ResponseManifest) -> int:
    """Writes the store and puts it in its place. Returns the tokens of all responses.

    Raises:
        UserError: prompts failed, and the store is not to be finished without them.
    """
    rows = sorted(answered_rows(job.work), key=lambda row: row["number"])
    done, reasons = {row["id"] for row in rows}, failures(job.work)
    failed = [{"id": q.id, "reason": reasons[q.id]} for q in job.questions if q.id not in done]
    if failed and not (job.allow_failed and rows):
        show_failures(failed)
        files = failed_files(job.work)
        where = files[0] if len(files) == 1 else job.work / "failed-*.jsonl"
        again = "the same command tries them again"
        advice = f"{again}, allow_failed=true finishes without them" if rows else f"see to the cause, {again}"
        raise UserError(f"{len(failed)} of {len(job.questions)} prompts failed (listed in {where}); {advice}")
    counts = {
        "prompts": len(job.questions),
        "responses": len(rows),
        "failed": len(failed),
        "tokens": sum(len(row["response"]) for row in rows),
        "retokenized": sum(row["retokenized"] for row in rows),
        "later_turns": sum(len(question.turns) - 1 for question in job.questions),
    }
    store = job.work / work_folder.STORE
    shutil.rmtree(store, ignore_errors=True)
    drawn = {"sampling": manifest.sampling, "seed": job.seed}
    write_responses(store, (row | drawn for row in rows), dataclasses.replace(manifest, counts=counts, failed=failed))
    work_folder.place(job.work, job.out, job.config, KIND)
    return counts["tokens"]


def show_failures(failed: Sequence[dict]) -> None:
    table = Table(title="prompts that failed", title_justify="left")
    table.add_column("id", overflow="fold")
    table.add_column("reason", overflow="fold")
    for failure in failed[:SHOWN_FAILURES]:
        table.add_row(escape(failure["id"]), escape(failure["reason"]))
    console().print(table)
    if len(failed) > SHOWN_FAILURES:
        console().print(f"and {len(failed) - SHOWN_FAILURES:,} more")
