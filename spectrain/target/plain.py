"""Whether a model of transformers computes what its class and config say, and nothing else.

The lean decoder reads shapes from the config and numbers from the weights. So it can stand for a model only while the
modules are those that the config builds: no hooks, adapters, parametrizations, replaced layers or methods.
"""

from __future__ import annotations

import copy
import re

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel

RECORDERS = "transformers.utils.output_capturing"  # its hooks stay on a model and only copy what passes
IGNORED = re.compile("_|training$|gradient_checkpointing$|name_or_path$")  # change nothing while texts are written


def alterations(module: nn.Module) -> list:
    """Return the hooks, and the `forward` of its own, that change what a module computes."""
    own = [vars(module)["forward"]] if "forward" in vars(module) else []
    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values(), *own
    return [hook for hook in hooks if getattr(hook, "__module__", "") != RECORDERS]


def describe(model: PreTrainedModel) -> dict[str, object]:
    """Return what each module is, by its name: two models with equal descriptions and weights compute alike."""
    described = {"hooks of all modules": _has_any_global_hook()}
    for name, module in model.named_modules():
        facts = [one for one in vars(module).items() if type(one[1]) in (bool, int, float, str)]
        shapes = [(key, one.shape) for key, one in module._parameters.items() if one is not None]
        facts = [one for one in facts if not IGNORED.match(one[0])]
        described[name] = type(module), type(module).forward, alterations(module), shapes, facts
    return described


def addresses(model: PreTrainedModel) -> tuple[int, ...]:
    """Return where the weights and buffers of a model are in memory."""
    return tuple(one.data_ptr() for one in (*model.parameters(), *model.buffers()))


def why_not_plain(model: PreTrainedModel) -> str | None:
    """Return what is unusual about a model, or None if its modules are those that its class and config build."""
    with torch.device("meta"):
        built = describe(type(model)(copy.deepcopy(model.config)))
    found, kinds = describe(model), {type(module) for module in model.modules()}
    foreign = [kind for kind in kinds if not kind.forward.__module__.startswith(("torch.nn.", "transformers."))]
    if foreign or _has_any_global_hook():
        return f"a forward or a hook of {foreign or 'all modules'} is none of transformers"
    name = next((name for name in (*found, *built) if found.get(name) != built.get(name)), None)
    return None if name is None else f"its {name or 'body'} has hooks, or is not the module that its config describes"
