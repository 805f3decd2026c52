"""Methods and baselines measured side by side: question by question, all in turn, so that a drifting machine hurts all.

Rows are written as soon as they are measured, and what a run has measured already is not measured again. A group is the
questions that are decoded in one go: one at batch size 1, else enough to keep the batch full by continuous batching.
"""

from __future__ import annotations

import json
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
from spectrain.decoding.errors import UserError
from spectrain.decoding.loop import check_prompt
from spectrain.measure.results import QuestionRow
from spectrain.stores.folder import read_lines, write_lines
from spectrain.stores.prompts import Question

log = logging.getLogger(__name__)

GROUPS_OF_BATCH = 4  # questions of a group, in batches: the last rows of a group run in an emptying batch
WARM_UP_TOKENS = 32
MAX_TURNS = 64


@dataclass(frozen=True)
class Benchmark:
    """What is measured on what."""

    target: TargetModel
    decoders: Mapping[str, Callable[..., list[Generation]]]  # called as `generate`, without target and drafter
    questions: Sequence[Question]
    prompt_ids: Callable[[Sequence[str], Sequence[Sequence[int]]], list[int]]  # of user turns and replies so far
    max_new_tokens: int  # of a reply
    batch_size: int = 1  # rows decoded together

    def run(self, file: Path) -> list[QuestionRow]:
        """Measure what `file` lacks, append it row by row, and return all rows."""
        asked = {(question.id, name) for question in self.questions for name in self.decoders}
        rows = [row for row in answered(file) if (row.question_id, row.method) in asked]
        done = {(row.question_id, row.method) for row in rows}
        if done:
            log.info("%d of %d answers are measured already", len(done), len(asked))
        if asked - done:
            self.warm_up()
        # Errors of an earlier run are tried again: the file keeps what was answered.
        write_lines(file, map(vars, rows))
        try:
            with file.open("a") as out:
                for row in shown(self.rows(done), len(asked - done)):
                    out.write(json.dumps(vars(row)) + "\n")
                    out.flush()
                    rows.append(row)
        except KeyboardInterrupt:
            print(f"interrupted with {len(rows)} answers in {file}; run the same command to resume", file=sys.stderr)
            raise SystemExit(130) from None
        return rows

    def warm_up(self) -> None:
        """Let everybody decode the first question for a few tokens; errors are left to the measurement."""
        for name in self.decoders:
            self._answer(name, [0], min(WARM_UP_TOKENS, self.max_new_tokens))

    def rows(self, done: set[tuple[str, str]]) -> Iterator[list[QuestionRow]]:
        """Measure what is not `done`, by (question id, method). Yields the rows of one group and method at a time."""
        group_size = 1 if self.batch_size == 1 else GROUPS_OF_BATCH * self.batch_size
        names = list(self.decoders)
        for turn, start in enumerate(range(0, len(self.questions), group_size)):
            group = range(start, min(start + group_size, len(self.questions)))
            # Another begins each time: whoever comes first after a slower one finds other caches and clocks.
            order = names[turn % len(names) :] + names[: turn % len(names)]
            for name in order:
                numbers = [n for n in group if (self.questions[n].id, name) not in done]
                if numbers:
                    yield self._answer(name, numbers, self.max_new_tokens)

    def _answer(self, name: str, numbers: Sequence[int], max_new_tokens: int) -> list[QuestionRow]:
        """Answer a group. Errors are recorded and the run goes on: a night is not lost to one question."""
        try:
            return self._play(name, numbers, max_new_tokens)
        except Exception as error:
            others = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
            log.warning("%s failed on %s%s: %s", name, self.questions[numbers[0]].id, others, error)
            log.debug("", exc_info=error)
            return [self._row(name, n, error) for n in numbers]

    def _play(self, name: str, numbers: Sequence[int], max_new_tokens: int) -> list[QuestionRow]:
        """Play all turns of a few questions, turn by turn. Whoever has no more turns, or does not fit, sits out."""
        rows = {n: self._row(name, n) for n in numbers}
        on_gpu = self.target.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.target.device)
        for turn in range(max(len(self.questions[n].turns) for n in numbers)):
            prompts: dict[int, list[int]] = {}
            for n, row in rows.items():
                turns = self.questions[n].turns
                if row.error is not None or turn >= len(turns):
                    continue
                prompt = self.prompt_ids(turns[: turn + 1], row.replies)
                try:
                    check_prompt(self.target, prompt, max_new_tokens)
                    prompts[n] = prompt
                except UserError as error:  # only this question fails, not its batch
                    rows[n] = self._row(name, n, error)
            if prompts:
                seeds = [n * MAX_TURNS + turn for n in prompts]
                found = self.decoders[name](list(prompts.values()), max_new_tokens, prompt_numbers=seeds)
                for (n, prompt), generation in zip(prompts.items(), found, strict=True):
                    rows[n].add_turn(len(prompt), generation, self.target.tokenizer.decode(generation.tokens))
        peak_bytes = torch.cuda.max_memory_allocated(self.target.device) if on_gpu else resident_bytes()
        for row in rows.values():
            row.peak_memory_bytes = 0 if row.error else peak_bytes
        return list(rows.values())

    def _row(self, name: str, number: int, error: Exception | None = None) -> QuestionRow:
        question = self.questions[number]
        reason = None if error is None else f"{type(error).__name__}: {error}"
        return QuestionRow(question.id, question.category, name, reason)


def resident_bytes() -> int:
    """What the process holds now, on the CPU, where a peak cannot be set back."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def answered(file: Path) -> Iterator[QuestionRow]:
    """The answered questions of an interrupted run, without a line that was cut off and without errors."""
    for values in read_lines(file):
        try:
            row = QuestionRow(**values)
        except TypeError:
            continue
        if row.error is None:
            yield row


def shown(groups: Iterator[Sequence[QuestionRow]], todo: int) -> Iterator[QuestionRow]:
    """Pass rows on with a progress bar; where the output is no terminal, log a line now and then."""
    times = (TimeElapsedColumn(), "left", TimeRemainingColumn())
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), *times)
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("answers", total=todo)
        n_done = 0
        for group in groups:
            progress.update(task, description=group[0].method.ljust(16), advance=len(group))
            before, n_done = n_done, n_done + len(group)
            if not sys.stderr.isatty() and n_done * 10 // todo > before * 10 // todo:
                log.info("%d of %d answers", n_done, todo)
            yield from group
