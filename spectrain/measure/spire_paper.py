"""What the SPIRe paper reports about its own 8-layer target: tau of each drafter, and throughput (Figure 5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache

import yaml

from spectrain.measure.cost import CostModel
from spectrain.measure.cost_inputs import METHODS, read_methods
from spectrain.measure.hardware import read_hardware
from spectrain.measure.model_shape import read_shapes
from spectrain.measure.tau import Setting
from spectrain.stores.locations import conf_dir

# tau of the ablations at k = 4 and contexts of 512 tokens (Table 1), by the names of conf/ablation/. That of the other
# drafters stands in conf/cost.yaml.
ABLATIONS = {
    "random_init": 3.105,
    "distill": 3.375,
    "hard": 3.069,
    "no_feedback": 3.352,
    "no_target_activations": 2.959,
}


@cache
def options() -> dict:
    """The options of `spectrain.cost +cost=spire_figure4`, with every method."""
    files = ("cost.yaml", "cost/spire_figure4.yaml", "hardware/spire_paper.yaml")
    base, figure, hardware = (yaml.safe_load((conf_dir() / file).read_text()) for file in files)
    return base | figure | {"hardware": hardware, "methods": list(METHODS)}


def paper_tau() -> dict[str, float]:
    """tau at k = 4 and contexts of 512 tokens. For a dense cache the paper assumes that of SPIRe (section 4.2)."""
    published = options()["published"]
    return {name: published[name] for name in METHODS[:3]} | ABLATIONS | {"dense_kv": published["spire_dense"]}


def multiplier(name: str, tau: float) -> float:
    """Model the throughput of a drafter with this tau relative to plain decoding of the paper's target, at its spot.

    A drafter without feedback costs as much as one with it, as in the paper's figure.
    """
    shapes, spot = read_shapes(options()), options()["spot"]
    methods = {method.name: method for method in read_methods(options(), shapes)[0]}
    method = methods["spire_dense" if name == "dense_kv" else name if name in methods else "spire"]
    model = CostModel(shapes.target, read_hardware(options()))
    return model.multiplier(dataclasses.replace(method, tau=tau), [spot["batch"]], [spot["context_tokens"]]).item()


def modelled(content: Mapping) -> dict[str, tuple[dict, float]]:
    """Model throughput at the paper's spot: with the measured tau of each drafter, and with the paper's own (Figure 5).

    Args:
        content: of drafters.json. tau must be of contexts of 512 tokens under T = 1 and of the paper's k; else there is
            nothing to model.
    """
    setting, found = Setting(options()["spot"]["context_tokens"], 1.0).name, {}
    for name in in_paper(content) if content["gamma"] == options()["published"]["k"] else ():
        if tau := content["drafters"][name]["tau"].get(setting):
            per_token = multiplier(name, 1.0)  # throughput is in proportion to tau
            ours = {key: None if value is None else per_token * value for key, value in tau.items()}
            found[name] = ours, multiplier(name, paper_tau()[name])
    return found


def in_paper(content: Mapping) -> list[str]:
    """The drafters of drafters.json that the paper has by this name; none if there is only one."""
    known = [name for name in content["drafters"] if name in paper_tau()]
    return known if len(known) > 1 else []
