"""Build every method of the registry for a tiny target, with artifacts of every kind.

So a new method is tested without being named. It is built from its yaml, as commands build it. Options that a test
needs smaller than in the yaml stand in the test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from omegaconf import OmegaConf
from transformers import PreTrainedModel

from spectrain.decoding import Drafter
from spectrain.methods.registry import build_method, method_config, with_papers_nodes
from spectrain.target import TargetModel, tokenizer_fingerprint
from tests.models.test_artifacts import export_spire, export_vanilla, tiny_tokenizer
from tests.models.test_head import export_head
from tests.models.tiny_dflash import export_dflash
from tests.models.tiny_eagle3 import export_eagle3
from tests.retrieval.reference import make_store


class Artifacts(dict):
    """Folders by kind, for `build_method`; each is made when it is first asked for.

    Args:
        folder: of them all; empty.
        target: what is decoded; of a model alone, a target with a tiny tokenizer is made.
        draft_model: of the vanilla drafter, with the target's vocabulary.
        documents: of the datastore.
        spire: options of `export_spire`.
    """

    def __init__(
        self,
        folder: Path,
        target: PreTrainedModel | TargetModel,
        draft_model: Callable[[], PreTrainedModel],
        documents: Callable[[], Sequence[Sequence[int]]],
        **spire,
    ):
        super().__init__()
        self.folder, self.spire, self.draft_model, self.documents = folder, spire, draft_model, documents
        if not isinstance(target, TargetModel):
            tokenizer = tiny_tokenizer(vocab_size=target.config.get_text_config().vocab_size)
            target = TargetModel(target, tokenizer)
        self.target = target

    def get(self, kind, default=None):
        if kind is not None and kind not in self:
            self[kind] = str(getattr(self, f"make_{kind}")(self.folder / kind))
        return super().get(kind, default)

    def make_vanilla(self, folder: Path) -> Path:
        return export_vanilla(folder, self.target, self.draft_model())

    def make_spire(self, folder: Path) -> Path:
        torch.manual_seed(0)
        return export_spire(folder, self.target, **self.spire)

    def make_eagle3(self, folder: Path) -> Path:
        return export_eagle3(folder, self.target, k=3)

    def make_dflash(self, folder: Path) -> Path:
        return export_dflash(folder, self.target)

    def make_head(self, folder: Path) -> Path:
        """On the vanilla drafter. It stops at the first tokens or later, depending on what was drawn."""
        torch.manual_seed(0)
        return export_head(folder, self.target, Path(self.get("vanilla")), n_blocks=1)

    def make_datastore(self, folder: Path) -> Path:
        """Of one shard, for which conftest.py compiles; numba compiles again for each number of shards."""
        vocabulary = tokenizer_fingerprint(self.target.tokenizer)
        make_store(folder, self.documents(), self.target.vocab_size, tokenizer=vocabulary)
        return folder


def build(name: str, artifacts: Artifacts, options: Mapping = {}) -> Drafter:
    """A method of `conf/method/` for the artifacts' target, with these options in place of its yaml's.

    It drafts as many tokens as in the papers, unless the options say otherwise.
    """
    return build_method(OmegaConf.merge(with_papers_nodes(method_config(name)), options), *of(artifacts))


def build_auto(name: str, artifacts: Artifacts, options: Mapping = {}) -> Drafter:
    """The same as users get it, with `max_nodes=auto`."""
    return build_method(OmegaConf.merge(method_config(name), options), *of(artifacts))


def of(artifacts: Artifacts) -> tuple[TargetModel, Artifacts]:
    return artifacts.target, artifacts
