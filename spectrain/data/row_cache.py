"""Rows of a corpus on disk: tokenised once, for all ranks of a training and for every later one.

    packed = corpus_rows(corpus, target, row_tokens=1024)
    packed.train.tokens, packed.held_out.tokens

They lie in `ROWS`, beside what the hub's libraries keep, and may be removed at any time. A folder's name is a hash of
the options, of the tokenizer with its chat template, and of the names, sizes and times of the corpus's files, or of
what the hub calls its version.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path

import numpy as np
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HOME
from transformers import PreTrainedTokenizerBase

from spectrain.config.groups import Corpus
from spectrain.data.chats import Tally
from spectrain.data.overlap import question_runs
from spectrain.data.packing import Packed, open_packed, pack
from spectrain.data.prompts import read_prompts
from spectrain.data.tabular_files import HUB_TIMEOUT_S
from spectrain.data.texts import CORPUS_ADVICE, corpus_documents, files_of, is_remote
from spectrain.stores.files import naming_a_full_disk
from spectrain.stores.folder import digest, locked, write_folder
from spectrain.target import TargetModel, tokenizer_fingerprint
from spectrain.terminal import stage

log = logging.getLogger(__name__)

ROWS = Path(HF_HOME, "spectrain", "rows")
VERSION = 2  # of how rows are made


def corpus_rows(
    corpus: Corpus, target: TargetModel, row_tokens: int, loss_on: str = "response", document_mask: bool = False
) -> Packed:
    """Return the rows of a corpus for a target, which are made where they are not at hand.

    Log what was read and what was left out. See `packing.pack` for the options and errors.
    """
    forbidden = forbidden_runs(corpus, target.tokenizer)
    tokenizer, options = target.tokenizer, (corpus.held_out_share, corpus.max_documents, loss_on, document_mask)
    key = {
        "version": VERSION,
        "corpus": [asdict(corpus), [_version(path) for path in corpus.paths]],
        "decontaminated": [] if forbidden is None else forbidden.tolist(),
        "rows": [row_tokens, *options],
        "target": [tokenizer_fingerprint(tokenizer), tokenizer.chat_template, target.vocab_size, target.eos_ids],
    }
    folder = ROWS / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]  # so many that none is taken for another
    with locked(folder, wait=True):
        if not folder.is_dir():
            tally = Tally(corpus.name, CORPUS_ADVICE)
            documents = corpus_documents(corpus, tally, tokenizer, shuffled=True)
            facts = target.vocab_size, target.eos_ids, forbidden

            def write(temporary: Path) -> None:
                pack(documents, tokenizer, row_tokens, *options, *facts, tally, temporary)

            with naming_a_full_disk(folder.parent), stage(f"reading {corpus.name} and packing it into rows"):
                write_folder(folder, write)
            log.info("rows are kept in %s", folder)
    packed = open_packed(folder)
    for sentence in packed.said:
        log.info(sentence)
    return packed


def forbidden_runs(corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> np.ndarray | None:
    """Return the hashes of the prompts that no document of a corpus may share; None: it is not compared."""
    questions = [question for path in corpus.prompt_paths for question in read_prompts(path)]
    return question_runs(questions, tokenizer) if questions else None


def _version(path: str | None) -> object:
    """Return what changes with the content of a corpus, as far as that is known without reading it."""
    if is_remote(path):
        try:
            return HfApi().dataset_info(path, timeout=HUB_TIMEOUT_S).sha
        except Exception:  # reading it will say what is wrong
            return None
    found = [(str(file), file.stat()) for file in files_of(path) if file.is_file()]
    return digest([[name, facts.st_size, facts.st_mtime_ns] for name, facts in found])
