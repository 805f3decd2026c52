"""What `spectrain.tune method=specdecpp` compares: a drafter, the heads that were trained on it, and the settings.

Heads are `stopping.heads=` (folders or globs), `method.head=` or `head=`; by default all below `checkpoints/` that
belong to this target and drafter. The drafter is `drafter=`; by default the one that the first (or newest) head names.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint
from spectrain.decoding.errors import UserError, check_whole
from spectrain.measure.stop_simulation import Setting
from spectrain.measure.stopping_results import FIXED, HEAD
from spectrain.methods.registry import find_artifact, given_artifacts, names
from spectrain.methods.specdecpp import OpenDrafter, open_drafter
from spectrain.methods.stopping import StopRule
from spectrain.models.artifacts import MANIFEST, read_manifest
from spectrain.models.head import AcceptanceHead, HeadFacts, read_head_facts
from spectrain.stores.locations import CHECKPOINTS

log = logging.getLogger(__name__)

FAMILIES = {"gamma": FIXED, "confidence": "confidence", "entropy": "entropy", "head": HEAD}  # by rule


@dataclass(frozen=True)
class Head:
    """A head that is open."""

    folder: Path
    facts: HeadFacts
    module: AcceptanceHead

    def described(self) -> dict:
        """What a reader wants to know of it."""
        trained = read_manifest(self.folder, "head").trained
        return {
            "folder": str(self.folder),
            "w_rej": self.facts.w_rej,
            "n_blocks": self.facts.head.n_blocks,
            "mixing_share": self.facts.mixing_share,
            "trained_for": self.facts.sampling.describe(),
            "trained": trained,
        }


@dataclass(frozen=True)
class Stopping:
    """What is compared, and how."""

    opened: OpenDrafter
    heads: dict[str, Head]
    settings: tuple[Setting, ...]
    min_candidates: int
    max_candidates: int
    timed: int  # prompts
    rows: int  # roots drafted from at a time

    @property
    def modules(self) -> dict[str, AcceptanceHead]:
        return {name: head.module for name, head in self.heads.items()}

    def drafter(self, setting: Setting, rule: StopRule) -> Drafter:
        """The decoding method with the draft length of a setting, under this rule."""
        return self.opened.with_stop(setting.gamma_within(self.max_candidates), rule)


def check_options(cfg: DictConfig) -> None:
    """Everything that can be wrong without opening a model.

    Raises:
        UserError: a value is out of range.
    """
    settings_of(cfg, ["x"])
    stopping, method = cfg.stopping, cfg.method
    for name in ("timed", "rows"):
        check_whole(f"stopping.{name}", stopping[name], 1)
    for name in ("gammas", "thresholds", "judge"):
        if not listed(stopping[name]):
            raise UserError(f"stopping.{name} is empty; give at least one value")
    longest = max(listed(stopping.gammas))
    if longest > method.max_candidates:
        raise UserError(
            f"stopping.gammas has {longest}, more than method.max_candidates={method.max_candidates}; raise "
            "method.max_candidates"
        )
    if method.min_candidates > method.max_candidates:
        raise UserError(
            f"method.min_candidates={method.min_candidates} must not exceed method.max_candidates="
            f"{method.max_candidates}; lower method.min_candidates"
        )


def listed(value: object) -> list:
    """An option that takes one value or a list of them."""
    return [] if value is None else list(value) if isinstance(value, ListConfig) else [value]


def settings_of(cfg: DictConfig, heads: Sequence[str]) -> tuple[Setting, ...]:
    """Every setting, fixed lengths first. Raises UserError where a value is out of range."""
    stopping = {name: listed(value) for name, value in cfg.stopping.items()}
    for name in ("min_candidates", "max_candidates"):
        check_whole(f"method.{name}", cfg.method[name], 1)
    return (
        *(Setting("gamma", gamma) for gamma in stopping["gammas"]),
        *(Setting("confidence", threshold) for threshold in stopping["confidence"]),
        *(Setting("entropy", threshold) for threshold in stopping["entropy"]),
        *(
            Setting("head", threshold, head, judge)
            for head in heads
            for judge in stopping["judge"]
            for threshold in stopping["thresholds"]
        ),
    )


def open_stopping(cfg: DictConfig, target: TargetModel, sampling: Sampling) -> Stopping:
    """Opens drafter and heads.

    Raises:
        UserError: they do not fit one another or the target, or there is no head.
    """
    prints = fingerprint(target.model, target.tokenizer)
    folders = named_heads(cfg)
    opened = open_drafter(target, *drafter_of(cfg, target, folders, prints))
    if folders is None:
        folders = fitting_heads(prints, opened)
    heads: dict[str, Head] = {}
    for folder in folders:
        facts = read_head_facts(folder, prints)
        name = folder.name if folder.name not in heads else str(folder)
        heads[name] = Head(folder, facts, opened.open_head(folder, facts))
        warning = facts.why_off(folder, sampling)
        if warning:
            log.warning("%s", warning)
    stopping, method = cfg.stopping, cfg.method
    longest = opened.with_stop(method.max_candidates, None).gamma  # a SPIRe drafter has its window
    for name, value in (
        ("stopping.gammas", max(listed(stopping.gammas))),
        ("method.min_candidates", method.min_candidates),
    ):
        if value > longest:
            raise UserError(f"{name} has {value}, more than this drafter's {longest} tokens a draft; lower it")
    return Stopping(
        *(opened, heads, settings_of(cfg, list(heads)), method.min_candidates, longest),
        *(stopping.timed, stopping.rows),
    )


def named_heads(cfg: DictConfig) -> list[Path] | None:
    """The folders that the user named, or None. Raises UserError where a pattern matches nothing."""
    patterns = names(cfg.stopping.heads) or names(cfg.method.head) or names(cfg.head)
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        if not matches:
            raise UserError(f"stopping.heads={pattern} matches no folder; give folders of +exp=specdecpp")
        found |= dict.fromkeys(map(Path, matches))
    return list(found) or None


def drafter_of(cfg: DictConfig, target: TargetModel, heads: Sequence[Path] | None, prints: str) -> tuple[str, str]:
    """Kind and folder of the drafter.

    Raises:
        UserError: two were given, or neither a drafter nor a head that names one is there.
    """
    given: Mapping[str, str] = {k: v for k, v in given_artifacts(cfg).items() if k in ("vanilla", "spire")}
    if len(given) > 1:
        raise UserError(f"drafter={cfg.drafter} names two drafters; give the one that the heads were trained on")
    if given:
        return next(iter(given.items()))
    if heads is None:
        try:
            heads = [Path(find_artifact("head", target))]
        except UserError as error:
            raise UserError(_NO_HEADS.format("target")) from error
    drafter = read_head_facts(heads[0], prints).drafter
    return drafter.kind, drafter.path if Path(drafter.path).exists() else find_artifact(drafter.kind, target)


def fitting_heads(prints: str, opened: OpenDrafter) -> list[Path]:
    """All heads below `checkpoints/` of this target and drafter, by name. Raises UserError where there is none."""
    found = []
    for file in sorted(CHECKPOINTS.glob(f"*/{MANIFEST}")):
        try:
            if read_manifest(file.parent, "head").kind != "head":
                continue
            facts = read_head_facts(file.parent, prints)
        except UserError as error:
            log.info("passed over: %s", error)
            continue
        if facts.drafter.fingerprint == opened.facts.fingerprint:
            found.append(file.parent)
    if not found:
        raise UserError(_NO_HEADS.format(f"drafter {opened.facts.path}"))
    return found


_NO_HEADS = (
    f"{CHECKPOINTS}/ holds no acceptance head for this {{}}; train one with python -m spectrain.train +exp=specdecpp, "
    "or give stopping.heads=[<folder>]"
)
