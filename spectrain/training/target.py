"""Trains a small target to draft for: a Llama from scratch on the corpus, with a tokenizer of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from spectrain.data.chats import Tally
from spectrain.data.texts import CORPUS_ADVICE, corpus_documents, train_tokenizer
from spectrain.stores.folder import write_folder
from spectrain.target import TargetModel
from spectrain.target.loading import read_tokenizer
from spectrain.training.base import Experiment, Parts
from spectrain.training.checkpoints import load_weights
from spectrain.training.vanilla import LanguageModelTraining


class TargetExperiment(Experiment):
    """A Llama from scratch. It has no target itself; its tokenizer is kept in the run folder."""

    exports, has_target = "target", False

    def prepare(self) -> Parts:
        self.run.begin()
        tokenizer = self._tokenizer()
        model = self._new(tokenizer)
        rows = self.data.drafter_rows(self.run, TargetModel(model, tokenizer))
        return Parts(LanguageModelTraining(model, self.own.optimizer), rows)

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        tokenizer = read_tokenizer(self.run.path / "tokenizer")
        model = load_weights(self._new(tokenizer), weights, "model").to(torch.bfloat16)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _new(self, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
        ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        return LlamaForCausalLM(LlamaConfig(**self.own.model, **ends, attn_implementation="sdpa"))

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        """Train a tokenizer; an interrupted run finds the one that it began with."""
        folder = self.run.path / "tokenizer"
        # fresh=true: another rank may still see what rank zero is about to replace
        if not folder.is_dir() or (self.config.fresh and rank_zero_only.rank != 0):
            corpus = self.config.corpus
            documents = corpus_documents(corpus, Tally(corpus.name, CORPUS_ADVICE))
            texts = (document.text for document in documents if not document.is_held_out(corpus.held_out_share))
            tokenizer = train_tokenizer(texts, self.own.model["vocab_size"])
            if rank_zero_only.rank != 0:
                return tokenizer
            write_folder(folder, tokenizer.save_pretrained)
        return read_tokenizer(folder)
