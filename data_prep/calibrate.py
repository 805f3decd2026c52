"""Calibrate a datastore: count on known texts how far its continuations can be believed (SSSD, section 3.1.3).

python -m data_prep.datastore out=<datastore> target=<folder or hub id> calibrate=<prompts or responses>
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from spectrain.decoding import TargetModel, generate
from spectrain.decoding.loop import check_prompt
from spectrain.errors import UserError
from spectrain.methods.pld import PromptLookup
from spectrain.methods.sssd import Sssd, SssdOptions
from spectrain.retrieval.calibration import calibrate, write_calibration
from spectrain.retrieval.datastore import open_datastore
from spectrain.stores.prompts import conversation_ids, read_prompts
from spectrain.stores.texts import responses_of

log = logging.getLogger(__name__)

ANSWER_TOKENS = 64  # of an answer to a prompt
BATCH_SIZE = 8
MAX_NODES = 64  # of the trees whose branches are counted: the longest that sssd drafts by default


def calibrate_store(folder: Path, target: TargetModel, answers: str) -> None:
    """Write `calibration.json` into a datastore, counted on a file of prompts or a folder of responses."""
    method = Sssd(open_datastore(folder, target), SssdOptions(), MAX_NODES)
    texts = answered(target, answers) if Path(answers).is_file() else stored(target, answers)
    texts = [(prompt, response) for prompt, response in texts if prompt and len(response) > 1]
    if not texts:
        raise UserError(f"calibrate={answers} gives no response of two tokens or more; give more prompts")
    factors = calibrate(texts, method.retrievers[0], method.options.max_prefix, method.branch_tokens)
    log.info("calibrated on %d texts: %s", len(texts), write_calibration(folder, factors))


def answered(target: TargetModel, file: str) -> Iterator[tuple[list[int], list[int]]]:
    """Let the target answer a file of prompts greedily, and return the token ids of prompts and answers."""
    prompts = []
    for question in read_prompts(file, None):
        prompts.append(conversation_ids(target.tokenizer, question.turns[:1], [], "auto"))
        check_prompt(target, prompts[-1], ANSWER_TOKENS, f"prompt {question.id}")
    found = generate(target, PromptLookup(), prompts, ANSWER_TOKENS, batch_size=BATCH_SIZE)
    return zip(prompts, (one.tokens for one in found), strict=True)


def stored(target: TargetModel, folder: str) -> Iterator[tuple[list[int], list[int]]]:
    """Read prompts and responses of one or several stores of `data_prep.responses`."""
    try:
        stores = responses_of(folder, target.tokenizer)
    except UserError as error:
        raise UserError(f"calibrate={folder}: {error}") from error
    return ((list(row["prompt"]), list(row["response"])) for store in stores for row in store.rows)
