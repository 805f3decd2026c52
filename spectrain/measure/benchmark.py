"""Measures contenders side by side: question by question, all in turn, so that a drifting machine hurts all alike.

Rows are handed out as soon as they are measured; what a run has measured already is not measured again.

A group is the questions that a contender decodes in one go: one at batch size 1, else enough to keep the batch full by
continuous batching.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from spectrain.decoding import Generation, TargetModel
from spectrain.decoding.errors import UserError
from spectrain.decoding.loop import check_prompt
from spectrain.measure.contenders import Contender, Work
from spectrain.measure.results import QuestionRow, question_row

log = logging.getLogger(__name__)

GROUPS_OF_BATCH = 4  # questions of a group, in batches: the last rows of a group run in an emptying batch
WARM_UP_TOKENS = 32
MAX_TURNS = 64


class Question(Protocol):
    """What is asked; see `spectrain.stores.prompts`."""

    id: str
    category: str
    turns: Sequence[str]


Ids = Callable[[Sequence[str], Sequence[Sequence[int]]], list[int]]  # (user turns, replies so far) -> prompt token ids


@dataclass(frozen=True)
class Benchmark:
    """What is measured on what.

    Args:
        target: the model.
        contenders: by name.
        questions: prompts, of one or more turns.
        prompt_ids: makes the token ids of a conversation.
        work: length, sampling, batch size.
    """

    target: TargetModel
    contenders: dict[str, Contender]
    questions: Sequence[Question]
    prompt_ids: Ids
    work: Work

    def warm_up(self) -> None:
        """Every contender decodes the first question for a few tokens; errors are left to the measurement."""
        short = dataclasses.replace(self.work, max_new_tokens=min(WARM_UP_TOKENS, self.work.max_new_tokens))
        for name in self.contenders:
            self._decode(name, self.questions[:1], [0], short)

    def rows(self, done: set[tuple[str, str]]) -> Iterator[list[QuestionRow]]:
        """Measures what is missing. Yields the rows of one group and contender after another.

        Args:
            done: (question id, contender) that are measured already.
        """
        size = self.work.batch_size
        group_size = 1 if size == 1 else GROUPS_OF_BATCH * size
        names = list(self.contenders)
        for turn, start in enumerate(range(0, len(self.questions), group_size)):
            group = self.questions[start : start + group_size]
            # Another begins each time: whoever comes first after a slower one finds other caches and clocks.
            order = names[turn % len(names) :] + names[: turn % len(names)]
            for name in order:
                numbers = [n for n, q in enumerate(group, start) if (q.id, name) not in done]
                if numbers:
                    yield self._decode(name, [self.questions[n] for n in numbers], numbers, self.work)

    def _decode(
        self, name: str, questions: Sequence[Question], numbers: Sequence[int], work: Work
    ) -> list[QuestionRow]:
        """The rows of a group. What goes wrong is recorded and the run goes on: a night is not lost to a question."""
        try:
            return self._play(name, questions, numbers, work)
        except Exception as error:
            others = f" and {len(questions) - 1} more" if len(questions) > 1 else ""
            log.warning("%s failed on %s%s: %s", name, questions[0].id, others, error)
            log.debug("", exc_info=error)
            return [_failed(q, name, error) for q in questions]

    def _play(self, name: str, questions: Sequence[Question], numbers: Sequence[int], work: Work) -> list[QuestionRow]:
        """All turns of a few questions, turn by turn; who has no more turns, or does not fit any more, sits out."""
        plays = [_Play(question, number) for question, number in zip(questions, numbers, strict=True)]
        self._forget_peak()
        for turn in range(max(len(q.turns) for q in questions)):
            playing, prompts = [], []
            for play in plays:
                if play.error is None and turn < len(play.question.turns):
                    replies = [g.tokens for g in play.generations]
                    prompt = self.prompt_ids(play.question.turns[: turn + 1], replies)
                    try:
                        check_prompt(self.target, prompt, work.max_new_tokens)
                    except UserError as error:
                        play.error = error
                        continue
                    playing.append(play)
                    prompts.append(prompt)
            if not playing:
                break
            found = self.contenders[name].decode(prompts, [p.number * MAX_TURNS + turn for p in playing], work)
            for play, prompt, generation in zip(playing, prompts, found, strict=True):
                play.generations.append(generation)
                play.prompt_tokens.append(len(prompt))
        peak_bytes = self._peak_bytes()
        return [_failed(p.question, name, p.error) if p.error else self._row(p, name, peak_bytes) for p in plays]

    def _row(self, play: _Play, name: str, peak_bytes: int) -> QuestionRow:
        question = play.question
        text = [self.target.tokenizer.decode(g.tokens) for g in play.generations]
        return question_row(
            question.id, question.category, name, play.generations, play.prompt_tokens, text, peak_bytes
        )

    def _forget_peak(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.target.device)

    def _peak_bytes(self) -> int:
        """Of the GPU since `_forget_peak`; on the CPU what the process holds now (its peak cannot be set back)."""
        if self.target.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.target.device)
        try:
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0


@dataclass
class _Play:
    """A question being answered."""

    question: Question
    number: int
    generations: list[Generation] = field(default_factory=list)  # of each turn
    prompt_tokens: list[int] = field(default_factory=list)
    error: UserError | None = None


def _failed(question: Question, name: str, error: Exception) -> QuestionRow:
    return QuestionRow(question.id, question.category, name, error=f"{type(error).__name__}: {error}")
