"""Methods and baselines measured side by side: question by question, all in turn, so that a drifting machine hurts all.

Rows are written as soon as they are measured, and what a run has measured already is not measured again. A group is the
questions that are decoded in one go: one at batch size 1, else enough to keep the batch full by continuous batching.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil
import torch

from spectrain.data.prompts import Question
from spectrain.decoding import Generation
from spectrain.decoding.engine import check_prompt
from spectrain.errors import UserError
from spectrain.kernels import Graphs, n_compiled
from spectrain.measure.bandwidth import loop_steps
from spectrain.measure.results import QuestionRow, failed_row, question_row
from spectrain.stores.environment import OtherWork
from spectrain.stores.files import RowFile
from spectrain.target import TargetModel
from spectrain.terminal import stage

log = logging.getLogger(__name__)

GROUPS_OF_BATCH = 4  # questions of a group, in batches: the last rows of a group run in an emptying batch
WARM_UPS, WARM_UP_TOKENS = 2, 64
MOST_WARM_UPS = 8
MAX_TURNS = 64


@dataclass(frozen=True)
class Benchmark:
    """Methods and the questions that they are measured on."""

    target: TargetModel
    decoders: Mapping[str, Callable[..., list[Generation]]]  # called as `generate`, without target and drafter
    questions: Sequence[Question]
    prompt_ids: Callable[[Question, Sequence[Sequence[int]]], list[int]]  # of the next turn, and replies so far
    max_new_tokens: int  # of a reply
    batch_size: int = 1  # rows decoded together
    strict: bool = False  # an answer fails during which something was compiled or recorded; as on a GPU
    max_length: int | None = None  # of a prompt with its reply

    def run(self, file: Path) -> list[QuestionRow]:
        """Measure what `file` lacks or has an error for, append it row by row, and return all rows."""
        asked = {(question.id, name) for question in self.questions for name in self.decoders}

        def keep(row: QuestionRow) -> bool:  # of other batch sizes all
            return row.batch_size != self.batch_size or (row.error is None and (row.question_id, row.method) in asked)

        rows = RowFile(file, QuestionRow, keep, writes=self.target.leads)
        # Ranks that share a target leave out the same answers, though one may read the file of an earlier run.
        done = self.target.agreed({(r.question_id, r.method) for r in rows.rows if r.batch_size == self.batch_size})
        if done:
            log.info("%d of %d answers (one per question and method) are measured already", len(done), len(asked))
        if asked - done:
            with stage("warming up"):
                self.warm_up(done)
            # Searching for garbage among what torch and transformers loaded takes 0.4 s, in whichever answer it falls.
            gc.collect()
            gc.freeze()
        try:
            with stage("answers", len(asked - done)) as advance:  # one per question and method
                for group in self.groups(done):
                    for row in group:
                        rows.append(row)
                    advance(len(group), f"{len(rows.rows)} of {len(asked)}, {group[0].method}")
        finally:
            gc.unfreeze()
        return rows.rows

    def warm_up(self, done: Collection[tuple[str, str]] = ()) -> None:
        """Let everybody decode the first batch for a few tokens; errors are left to the measurement.

        Where the benchmark is strict, the longest questions are answered in full, until nothing is prepared any more.
        """
        order, n_new = list(range(len(self.questions))), min(WARM_UP_TOKENS, self.max_new_tokens)
        if self.strict:
            most, n_new = self.target.max_positions - self.max_new_tokens, self.max_new_tokens
            order = [n for n in order if len(self.prompt_ids(self.questions[n], [])) <= most]
            order.sort(key=lambda n: -sum(map(len, self.questions[n].turns)))
        for name, n_rows in dict.fromkeys((name, min(self.batch_size, len(group))) for name, group in self.todo(done)):
            for i in range(MOST_WARM_UPS if self.strict and order else WARM_UPS):
                rows = self.answer(name, order[:n_rows], n_new)
                # Methods that choose among others run each of them.
                if i + 1 >= WARM_UPS and not self.target.agreed(any(row.prepared for row in rows)):
                    break

    def groups(self, done: Collection[tuple[str, str]]) -> Iterator[list[QuestionRow]]:
        """Measure what is not `done`, by (question id, method). Yields the rows of one group and method at a time."""
        for name, numbers in self.todo(done):
            yield self.answer(name, numbers, self.max_new_tokens)

    def todo(self, done: Collection[tuple[str, str]]) -> Iterator[tuple[str, list[int]]]:
        """Yield each method, and numbers of questions, that are answered in one go, in their order."""
        group_size = 1 if self.batch_size == 1 else GROUPS_OF_BATCH * self.batch_size
        names, starts = list(self.decoders), list(range(0, len(self.questions), group_size))
        if len(starts) > 1 and len(self.questions) - starts[-1] < self.batch_size:
            starts.pop()  # what is left would be no full batch, so that other shapes were prepared
        for turn, (start, stop) in enumerate(pairwise([*starts, len(self.questions)])):
            group = range(start, stop)
            # Another begins each time: whoever comes first after a slower one finds other caches and clocks.
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                numbers = [n for n in group if (self.questions[n].id, name) not in done]
                if numbers:
                    yield name, numbers

    def answer(self, name: str, numbers: Sequence[int], max_new_tokens: int) -> list[QuestionRow]:
        """Answer a few questions with one method. Errors are recorded: a night is not lost to one question."""
        before, other = preparations(), OtherWork()
        try:
            rows = self._play(name, numbers, max_new_tokens)
        except Exception as error:
            others = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
            log.warning("%s failed on %s%s: %s", name, self.questions[numbers[0]].id, others, error)
            log.debug("", exc_info=error)
            rows = [failed_row(self.questions[n], name, f"{type(error).__name__}: {error}") for n in numbers]
        other_work, prepared = other.share(), preparations() - before
        if self.strict and prepared:
            why = f"compiled inside the answer; {prepared} graphs or programs were made while it was timed"
            rows = [
                row if row.error else failed_row(self.questions[n], name, why)
                for n, row in zip(numbers, rows, strict=True)
            ]
        return [replace(row, batch_size=self.batch_size, prepared=prepared, other_work=other_work) for row in rows]

    def _play(self, name: str, numbers: Sequence[int], max_new_tokens: int) -> list[QuestionRow]:
        """Play all turns of a few questions, turn by turn."""
        device, failed = self.target.device, {}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        prompts, replies, steps = {n: [] for n in numbers}, {n: [] for n in numbers}, dict.fromkeys(numbers, 0.0)
        for turn in range(max(len(self.questions[n].turns) for n in numbers)):
            playing = {}
            for n in numbers:
                question = self.questions[n]
                if n in failed or turn >= len(question.turns):
                    continue
                prompt = self.prompt_ids(question, [g.tokens for g in replies[n]])
                try:
                    check_prompt(self.target, prompt, max_new_tokens, max_length=self.max_length)
                    playing[n] = prompt
                except UserError as error:  # only this question fails, not its batch
                    failed[n] = failed_row(question, name, f"{type(error).__name__}: {error}")
            if playing:
                seeds = [n * MAX_TURNS + turn for n in playing]
                found = self.decoders[name](list(playing.values()), max_new_tokens, prompt_numbers=seeds)
                forwards = [generation.target_forwards for generation in found]
                share = loop_steps(forwards, self.batch_size) / max(1, sum(forwards))
                for (n, prompt), generation in zip(playing.items(), found, strict=True):
                    steps[n] += share * generation.target_forwards
                    prompts[n].append(prompt)
                    replies[n].append(generation)
        peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_bytes()
        decode = partial(self.target.tokenizer.decode, skip_special_tokens=True)
        return [
            failed.get(n) or question_row(self.questions[n], name, prompts[n], replies[n], decode, peak_bytes, steps[n])
            for n in numbers
        ]


def preparations() -> int:
    """Count what was prepared in this process: graphs, compiled code."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    frames = dynamo.counters["frames"]["total"] if dynamo else 0
    return Graphs.n_prepared + frames + n_compiled()


def resident_bytes() -> int:
    """Return what the process holds now, on the CPU, where a peak cannot be set back."""
    return psutil.Process().memory_info().rss
