"""Texts that a target wrote, as token ids: known texts, on which `spectrain.tune` simulates decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint, generate
from spectrain.decoding.errors import UserError
from spectrain.decoding.loop import check_prompt
from spectrain.measure.simulation import Text
from spectrain.stores.folder import RowFile
from spectrain.stores.prompts import json_rows

DECODED_TOGETHER = 8  # rows


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
    """Read the answers of at least two tokens.

    Args:
        file: of `write_answers`, perhaps of another run.
        target: that wrote them.
        sampling, max_new_tokens: that this target must have written them with; None: this is not checked.
        least: number of such answers that are needed.

    Raises:
        UserError: the file is missing or has too few answers; or a row has no token ids of this vocabulary, or was
            written by something else.
    """
    if not file.is_file():
        raise UserError(f"responses={file} does not exist; give responses.jsonl of a run of spectrain.tune")
    expected, texts = {}, []
    if sampling is not None:
        expected = {"target": fingerprint(target.model, target.tokenizer), "sampling": sampling.describe()}
    for number, row in json_rows(file, f"responses={file}"):
        where = f"responses={file} row {number}"
        try:
            text = Text(list(row["prompt"]), list(row["response"]))
            fits = all(isinstance(t, int) and 0 <= t < target.vocab_size for t in text.prompt + text.response)
        except (KeyError, TypeError):
            fits = False
        if not fits:
            raise UserError(
                f"{where} has no prompt and response as token ids of this target; let spectrain.tune write them anew"
            )
        for name, value in expected.items():
            if row.get(name, value) != value:
                raise UserError(
                    f"{where} was written with {name} {row[name]}, not {value}; give the same {name}, or let "
                    "spectrain.tune write them anew"
                )
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
