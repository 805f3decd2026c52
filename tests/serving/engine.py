"""What vLLM's V1 engine does around a custom proposer, without vLLM: the same arrays, moves and calls.

Requests stand in rows of fixed arrays. A step schedules a chunk of the prompt, or the token and the drafts, of each;
the target verifies greedily; tokens are written behind the text, then the proposer is called; its drafts are written
behind that, as vLLM does. Rows that ended leave at the beginning of the next step: the last row moves into the hole,
and rows are swapped, as attention backends ask for.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from spectrain.decoding import TargetModel
from spectrain.serving.vllm_proposer import LookupProposer


@dataclass
class Asked:
    """A request, as the scheduler knows it."""

    number: int
    prompt: list[int]
    max_tokens: int
    computed: int = 0  # tokens of the prompt that were read
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.output) >= self.max_tokens


@dataclass
class Call:
    """What the proposer was asked and what it said, a row each."""

    texts: list[list[int]]
    sampled: list[list[int]]
    drafts: list[list[int]]


class StandInEngine:
    """Serves requests with a target and a proposer.

    Args:
        target: a tiny one.
        speculative_config: JSON, as it is given to `vllm serve`.
        max_rows: requests served at once.
        max_model_len: longest text.
        chunk_tokens: of a prompt that are read in a step.
        tokenizer: folder of the served model's.
        additional_config: as it is given to `vllm serve`.
        create: makes the proposer of a config; vLLM's own `create_custom_proposer`, or what stands in for it.
    """

    def __init__(
        self,
        target: TargetModel,
        speculative_config: str,
        max_rows: int = 3,
        max_model_len: int = 200,
        chunk_tokens: int = 8,
        tokenizer: str | None = None,
        additional_config: dict | None = None,
        create: Callable[[SimpleNamespace], LookupProposer] = LookupProposer,
    ) -> None:
        options = json.loads(speculative_config)
        assert options["method"] == "custom_class"
        self.target, self.max_rows, self.chunk_tokens = target, max_rows, chunk_tokens
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(**options),
            model_config=SimpleNamespace(
                max_model_len=max_model_len, tokenizer=tokenizer, get_vocab_size=lambda: target.vocab_size
            ),
            additional_config=additional_config or {},
        )
        self.proposer = create(config)
        self.token_ids_cpu = np.full((max_rows, max_model_len), -1, dtype=np.int32)
        self.num_tokens_no_spec = np.zeros(max_rows, dtype=np.int32)
        self.rows: list[Asked] = []
        self.waiting: list[Asked] = []
        self.calls: list[Call] = []
        self.random = random.Random(0)
        self.n_forwards = 0

    def serve(self, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        """The outputs, in the order of the prompts."""
        asked = [Asked(i, prompt, n) for i, (prompt, n) in enumerate(zip(prompts, max_tokens, strict=True))]
        self.waiting += asked
        while self.waiting or any(not request.done for request in self.rows):
            self.step()
        return [request.output for request in asked]

    def step(self) -> None:
        self._leave_and_join()
        self._swap()
        sampled = [self._forward(row, request) for row, request in enumerate(self.rows)]
        for row, (request, tokens) in enumerate(zip(self.rows, sampled, strict=True)):
            request.output += tokens
            n_tokens = int(self.num_tokens_no_spec[row])
            self.token_ids_cpu[row, n_tokens : n_tokens + len(tokens)] = tokens
            self.num_tokens_no_spec[row] += len(tokens)
        drafts = self.proposer.propose(sampled, self.num_tokens_no_spec, self.token_ids_cpu, slot_mappings=None)
        assert len(drafts) == len(self.rows)
        texts = [self.token_ids_cpu[row, : self.num_tokens_no_spec[row]].tolist() for row in range(len(self.rows))]
        self.calls.append(Call(texts, sampled, [list(draft) for draft in drafts]))
        for row, (request, draft) in enumerate(zip(self.rows, drafts, strict=True)):
            assert not draft or sampled[row], "a draft for a row that is not read to its end"
            request.drafts = draft
            n_tokens = int(self.num_tokens_no_spec[row])
            self.token_ids_cpu[row, n_tokens : n_tokens + len(draft)] = draft  # fails where it is too long

    def _forward(self, row: int, request: Asked) -> list[int]:
        """The tokens of this step, [] while the prompt is read."""
        self.n_forwards += 1
        if request.computed < len(request.prompt):
            request.computed = min(request.computed + self.chunk_tokens, len(request.prompt))
            if request.computed < len(request.prompt):
                return []
        n_tokens = int(self.num_tokens_no_spec[row])
        text = [*self.token_ids_cpu[row, :n_tokens].tolist(), *request.drafts]
        with torch.inference_mode():
            logits = self.target.model(torch.tensor([text])).logits[0, n_tokens - 1 :]
        best = logits.argmax(-1).tolist()
        tokens = [best[0]]
        for draft, following in zip(request.drafts, best[1:], strict=True):
            if draft != tokens[-1]:
                break
            tokens.append(following)
        return tokens[: request.max_tokens - len(request.output)]

    def _leave_and_join(self) -> None:
        for row in reversed(range(len(self.rows))):
            if self.rows[row].done:
                self._move(len(self.rows) - 1, row)
                self.rows.pop()
        while self.waiting and len(self.rows) < self.max_rows:
            request = self.waiting.pop(0)
            row = len(self.rows)
            self.rows.append(request)
            self.token_ids_cpu[row] = -1
            self.token_ids_cpu[row, : len(request.prompt)] = request.prompt
            self.num_tokens_no_spec[row] = len(request.prompt)

    def _move(self, source: int, destination: int) -> None:
        self.rows[destination] = self.rows[source]
        self.token_ids_cpu[destination] = self.token_ids_cpu[source]
        self.num_tokens_no_spec[destination] = self.num_tokens_no_spec[source]

    def _swap(self) -> None:
        if len(self.rows) < 2 or self.random.random() < 0.5:
            return
        a, b = self.random.sample(range(len(self.rows)), 2)
        self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
        for array in (self.token_ids_cpu, self.num_tokens_no_spec):
            array[[a, b]] = array[[b, a]]
