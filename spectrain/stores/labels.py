"""A store of acceptance labels: what a drafter drafts beside a target's responses, and how probable it is that the
target accepts it; token ids and floats in a `datasets` folder (docs/data.md).

    store = open_acceptance("checkpoints/acceptance-1f0c93ab")
    store.check_fits(target_fingerprint, drafter_fingerprint, rollout_tokens=None)
    store.rows[0]["response"], store.rows[0]["drafts"][0], store.rows[0]["labels"][0]

At position i of a response X a token Y_i is drawn from q(. | prompt, X_<i); its label is min(1, p(Y_i) / q(Y_i)). A
SPIRe drafter is rolled out in blocks of `rollout_tokens` positions of the text, prompt included; the first of a block
is a root, which is the target's own token and never a draft. Roots have no draft: their q is 0, and so are their draft,
p and label. They are never trained on. Neither is a text's very first token, where the prompt is empty.

The folder is what `Dataset.save_to_disk` writes, with `manifest.json` beside its files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, Features, List, Value

from spectrain.decoding.errors import UserError
from spectrain.stores.folder import StoreKind
from spectrain.stores.rows import open_rows, save_rows

VERSION = 1
KIND = "acceptance"
BUILT_BY = "python -m data_prep.acceptance"
FEATURES = Features(
    {
        "id": Value("string"),  # of the prompt, unique
        "prompt": List(Value("int32")),
        "response": List(Value("int32")),  # X
        # [draws][positions of the response]
        "drafts": List(List(Value("int32"))),  # Y
        "p": List(List(Value("float32"))),  # the target's probability of each draft, warped
        "q": List(List(Value("float32"))),  # the drafter's; 0: no draft at this position
        "labels": List(List(Value("float32"))),  # min(1, p / q)
    }
)


@dataclass(frozen=True, kw_only=True)
class AcceptanceManifest:
    """What `manifest.json` says."""

    version: int = VERSION
    kind: str = KIND
    target: str  # folder or id
    target_fingerprint: str
    drafter: dict  # kind, path, fingerprint
    rollout_tokens: int | None  # of a SPIRe drafter's blocks; None: an ordinary draft model
    sampling: dict  # by which p and q are warped: temperature, top_k, top_p, min_p
    draws: int  # drafts a position
    responses: str  # name of the store they stand beside
    config: dict  # resolved
    counts: dict  # rows, positions (with a draft), tokens (of prompts and responses), mean_label, below_half
    skipped: list[dict] = field(default_factory=list)  # {"id", "tokens"} of responses longer than a model's context
    files: dict[str, dict] = field(default_factory=dict)  # name -> {"bytes", "sha256"}; `write_acceptance` fills it in


ACCEPTANCE = StoreKind(KIND, VERSION, AcceptanceManifest, option="data.path", built_by=BUILT_BY)


@dataclass(frozen=True)
class AcceptanceStore:
    """An open store. `rows` is memory-mapped, in the order of the responses, with the columns of FEATURES."""

    folder: Path
    manifest: AcceptanceManifest
    rows: Dataset

    def check_fits(self, target_fingerprint: str, drafter_fingerprint: str, rollout_tokens: int | None) -> None:
        """Raises UserError where the labels are of another target, another drafter, or other rollouts of it."""
        manifest, drafter = self.manifest, self.manifest.drafter
        if manifest.target_fingerprint != target_fingerprint:
            raise UserError(
                f"the labels in {self.folder} are of the target {manifest.target} ({manifest.target_fingerprint}), not "
                f"of this one ({target_fingerprint}); give that target, or make others with {BUILT_BY} target=..."
            )
        if drafter["fingerprint"] != drafter_fingerprint:
            raise UserError(
                f"the labels in {self.folder} are of the {drafter['kind']} drafter {drafter['path']} "
                f"({drafter['fingerprint']}), not of this one ({drafter_fingerprint}); give drafter={drafter['path']}, "
                f"or make others with {BUILT_BY} drafter=..."
            )
        if manifest.rollout_tokens != rollout_tokens:
            raise UserError(
                f"the labels in {self.folder} are of rollouts of {manifest.rollout_tokens} tokens, not of "
                f"{rollout_tokens}; give rollout_tokens={manifest.rollout_tokens}, or make others with {BUILT_BY} "
                f"rollout_tokens={rollout_tokens}"
            )


def write_acceptance(folder: Path, rows: Dataset, manifest: AcceptanceManifest) -> None:
    """Writes a store so that it appears whole or not at all.

    Args:
        folder: is made.
        rows: with FEATURES.
        manifest: its `files` are filled in.
    """
    assert rows.features == FEATURES, rows.features
    save_rows(folder, rows, manifest)


def open_acceptance(folder: str | Path) -> AcceptanceStore:
    """Opens a store; every file is read and compared with the manifest.

    Raises:
        UserError: there is no store of acceptance labels in the folder, it is of another version, or it is damaged.
    """
    folder = Path(folder)
    return AcceptanceStore(folder, *open_rows(ACCEPTANCE, folder, FEATURES, "rows"))


def newest_acceptance(root: Path, target_fingerprint: str, drafter_fingerprint: str) -> Path:
    """The newest store below `root` of this target and drafter.

    Raises:
        UserError: there is none.
    """
    prints = target_fingerprint, drafter_fingerprint
    found = ACCEPTANCE.newest(root, lambda one: (one.target_fingerprint, one.drafter.get("fingerprint")) == prints)
    if found is None:
        raise UserError(
            f"{root}/ holds no acceptance labels of this target and drafter; make some with {BUILT_BY} drafter=..."
        )
    return found
