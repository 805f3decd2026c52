"""Texts that a target wrote, as token ids: known texts, on which `spectrain.tune` simulates decoding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint, generate
from spectrain.decoding.errors import UserError
from spectrain.decoding.loop import check_prompt
from spectrain.measure.simulation import Text
from spectrain.stores.folder import read_lines, write_lines

DECODED_TOGETHER = 8  # rows


def written_by(target: TargetModel, sampling: Sampling) -> dict[str, str]:
    """What the distribution of answers depends on."""
    return {"target": fingerprint(target.model, target.tokenizer), "sampling": sampling.describe()}


def write_answers(
    target: TargetModel,
    drafter: Drafter,
    prompts: Mapping[str, Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    file: Path,
) -> None:
    """Answer the prompts that `file` lacks, one line each; an interrupted run continues.

    Args:
        target: whose answers they are.
        drafter: any method; greedy answers do not depend on it.
        prompts: token ids by name.
        max_new_tokens: most tokens of an answer.
        sampling: of the answers.
        seed: of the samples.
        file: JSON lines of `id`, `prompt`, `response` and what the answers were written by.
    """
    rows = read_lines(file)
    write_lines(file, rows)  # without a line that was cut off
    done = {row["id"] for row in rows}
    todo = [(number, name) for number, name in enumerate(prompts) if name not in done]
    with file.open("a") as out:
        for start in track(range(0, len(todo), DECODED_TOGETHER), "responses", console=Console(stderr=True)):
            numbers, names = zip(*todo[start : start + DECODED_TOGETHER], strict=True)
            options = {"seed": seed, "prompt_numbers": numbers, "batch_size": DECODED_TOGETHER}
            found = generate(target, drafter, [prompts[name] for name in names], max_new_tokens, sampling, **options)
            for name, generation in zip(names, found, strict=True):
                row = {"id": name, "prompt": prompts[name], "response": generation.tokens}
                out.write(json.dumps(row | written_by(target, sampling)) + "\n")
            out.flush()


def read_answers(
    file: Path,
    target: TargetModel,
    sampling: Sampling | None = None,
    max_new_tokens: int | None = None,
    least: int = 1,
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
    rows, n_lines = read_lines(file), sum(1 for line in file.read_bytes().split(b"\n") if line.strip())
    if len(rows) < n_lines:
        raise UserError(f"responses={file} has {n_lines - len(rows)} lines that are not JSON; write it anew")
    expected, texts = written_by(target, sampling) if sampling is not None else {}, []
    for number, row in enumerate(rows, start=1):
        try:
            text = Text(list(row["prompt"]), list(row["response"]))
            fits = all(isinstance(t, int) and 0 <= t < target.vocab_size for t in text.prompt + text.response)
        except (KeyError, TypeError):
            fits = False
        if not fits:
            raise UserError(
                f"responses={file} row {number} has no prompt and response as token ids of this target; let "
                "spectrain.tune write them anew"
            )
        for name, value in expected.items():
            if row.get(name, value) != value:
                raise UserError(
                    f"responses={file} row {number} was written with {name} {row[name]}, not {value}; give the same "
                    f"{name}, or let spectrain.tune write them anew"
                )
        if len(text.response) > 1 and text.prompt:
            texts.append(text)
    for number, text in enumerate(texts if max_new_tokens is not None else ()):
        check_prompt(target, text.prompt, max_new_tokens, f"prompt {number}")
        n_tokens, ended = len(text.response), text.response[-1] in target.eos_ids
        if n_tokens > max_new_tokens or (n_tokens < max_new_tokens and not ended):
            raise UserError(
                f"responses={file} has a response of {n_tokens} tokens, which max_new_tokens={max_new_tokens} does "
                "not give; give the max_new_tokens that it was written with"
            )
    if len(texts) < least:
        raise UserError(f"there are {len(texts)} responses of two tokens or more, not {least}; give more prompts")
    return texts
