"""Methods and baselines measured side by side: question by question, all in turn, so that a drifting machine hurts all.

Rows are written as soon as they are measured, and what a run has measured already is not measured again. A group is the
questions that are decoded in one go: one at batch size 1, else enough to keep the batch full by continuous batching.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from spectrain.decoding import Generation, TargetModel
from spectrain.decoding.loop import check_prompt
from spectrain.errors import UserError
from spectrain.measure.results import QuestionRow, failed_row, question_row
from spectrain.stores.files import RowFile
from spectrain.stores.prompts import Question

log = logging.getLogger(__name__)

GROUPS_OF_BATCH = 4  # questions of a group, in batches: the last rows of a group run in an emptying batch
WARM_UPS, WARM_UP_TOKENS = 2, 64
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

    def run(self, file: Path) -> list[QuestionRow]:
        """Measure what `file` lacks or has an error for, append it row by row, and return all rows."""
        asked = {(question.id, name) for question in self.questions for name in self.decoders}
        rows = RowFile(file, QuestionRow, lambda row: row.error is None and (row.question_id, row.method) in asked)
        done = {(row.question_id, row.method) for row in rows.rows}
        if done:
            log.info("%d of %d answers (one per question and method) are measured already", len(done), len(asked))
        if asked - done:
            self.warm_up()
            # Searching for garbage among what torch and transformers loaded takes 0.4 s, in whichever answer it falls.
            gc.collect()
            gc.freeze()
        try:
            for group in shown(self.groups(done), len(asked - done)):
                for row in group:
                    rows.append(row)
        finally:
            gc.unfreeze()
        return rows.rows

    def warm_up(self) -> None:
        """Let everybody decode the first batch for a few tokens; errors are left to the measurement."""
        first = range(min(self.batch_size, len(self.questions)))
        for name in self.decoders:
            for _ in range(WARM_UPS):  # methods that choose among others run each of them
                self.answer(name, first, min(WARM_UP_TOKENS, self.max_new_tokens))

    def groups(self, done: set[tuple[str, str]]) -> Iterator[list[QuestionRow]]:
        """Measure what is not `done`, by (question id, method). Yields the rows of one group and method at a time."""
        group_size = 1 if self.batch_size == 1 else GROUPS_OF_BATCH * self.batch_size
        names = list(self.decoders)
        for turn, start in enumerate(range(0, len(self.questions), group_size)):
            group = range(start, min(start + group_size, len(self.questions)))
            # Another begins each time: whoever comes first after a slower one finds other caches and clocks.
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                numbers = [n for n in group if (self.questions[n].id, name) not in done]
                if numbers:
                    yield self.answer(name, numbers, self.max_new_tokens)

    def answer(self, name: str, numbers: Sequence[int], max_new_tokens: int) -> list[QuestionRow]:
        """Answer a few questions with one method. Errors are recorded: a night is not lost to one question."""
        try:
            return self._play(name, numbers, max_new_tokens)
        except Exception as error:
            others = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
            log.warning("%s failed on %s%s: %s", name, self.questions[numbers[0]].id, others, error)
            log.debug("", exc_info=error)
            return [failed_row(self.questions[n], name, error) for n in numbers]

    def _play(self, name: str, numbers: Sequence[int], max_new_tokens: int) -> list[QuestionRow]:
        """Play all turns of a few questions, turn by turn."""
        device, failed = self.target.device, {}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        prompts, replies = {n: [] for n in numbers}, {n: [] for n in numbers}
        for turn in range(max(len(self.questions[n].turns) for n in numbers)):
            playing = {}
            for n in numbers:
                question = self.questions[n]
                if n in failed or turn >= len(question.turns):
                    continue
                prompt = self.prompt_ids(question, [g.tokens for g in replies[n]])
                try:
                    check_prompt(self.target, prompt, max_new_tokens)
                    playing[n] = prompt
                except UserError as error:  # only this question fails, not its batch
                    failed[n] = failed_row(question, name, error)
            if playing:
                seeds = [n * MAX_TURNS + turn for n in playing]
                found = self.decoders[name](list(playing.values()), max_new_tokens, prompt_numbers=seeds)
                for (n, prompt), generation in zip(playing.items(), found, strict=True):
                    prompts[n].append(prompt)
                    replies[n].append(generation)
        peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_bytes()
        decode = self.target.tokenizer.decode
        return [
            failed.get(n) or question_row(self.questions[n], name, prompts[n], replies[n], decode, peak_bytes)
            for n in numbers
        ]


def resident_bytes() -> int:
    """Return what the process holds now, on the CPU, where a peak cannot be set back."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def shown(groups: Iterator[Sequence[QuestionRow]], todo: int) -> Iterator[Sequence[QuestionRow]]:
    """Pass groups on with a progress bar; where the output is no terminal, log a line now and then."""
    times = (TimeElapsedColumn(), "left", TimeRemainingColumn())
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), *times)
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task, n_done = progress.add_task("answers", total=todo), 0
        for group in groups:
            progress.update(task, description=group[0].method.ljust(16), advance=len(group))
            before, n_done = n_done, n_done + len(group)
            if not sys.stderr.isatty() and n_done * 10 // todo > before * 10 // todo:
                log.info("%d of %d answers, one per question and method", n_done, todo)
            yield group
