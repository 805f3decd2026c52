"""Chooses what depends on the machine or the text: nodes of a draft tree, SSSD's discounts, when drafts should end.

    python -m spectrain.tune budget=true target=<folder or hub id> prompts=<file.jsonl> methods=[logitspec,pld]
    python -m spectrain.tune method=specdecpp target=<folder or hub id> prompts=<file.jsonl>

See docs/tune.md. `max_nodes=auto` of `spectrain.bench` and `spectrain.generate` then goes by what was measured.
"""

from __future__ import annotations

from collections.abc import Callable

from omegaconf import DictConfig

from spectrain.cli import command
from spectrain.decoding.errors import UserError
from spectrain.measure.tune_budget import tune_budget
from spectrain.measure.tune_specdecpp import tune_specdecpp
from spectrain.measure.tune_sssd import tune_sssd

SEARCHES: dict[str, Callable[[DictConfig], None]] = {  # method=<name>: what searches for its options
    "sssd": tune_sssd,
    "specdecpp": tune_specdecpp,
}


def main(cfg: DictConfig) -> None:
    if cfg.budget:
        tune_budget(cfg)
        return
    method = cfg.get("method")  # the yaml of conf/method/
    name = method["_target_"].split(".")[-2] if method else None
    if name not in SEARCHES:
        choices = " or ".join(["budget=true", *(f"method={known}" for known in SEARCHES)])
        raise UserError(f"method={name or 'null'} has nothing to tune; give {choices}")
    SEARCHES[name](cfg)


if __name__ == "__main__":
    command("tune")(main)()
