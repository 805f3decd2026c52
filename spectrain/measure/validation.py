"""tau around a training: the settings of both measurements, checked before it, and the one within it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple

from torch import Tensor, nn

from spectrain.decoding import Drafter, TargetModel
from spectrain.decoding.errors import UserError, check_whole
from spectrain.measure.tau import TauSettings, tau_of
from spectrain.methods.speculative import Speculative
from spectrain.methods.spire import Spire
from spectrain.models.spire import SpireDrafter


def tau_settings(config: Mapping, target: TargetModel) -> tuple[TauSettings, TauSettings]:
    """Check what is measured after a training (the `tau` node), and within it (`select`)."""
    tau, select, row_tokens = config["tau"], config["select"], config["data"]["row_tokens"]
    after = TauSettings(**{name: tuple(v) if isinstance(v, Sequence) else v for name, v in tau.items()})
    for name in ("contexts", "context_tokens", "new_tokens"):
        check_whole(f"select.{name}", select[name], 1)
    within = TauSettings(
        context_tokens=(select["context_tokens"],),
        contexts=select["contexts"],
        new_tokens=select["new_tokens"],
        temperatures=(select["temperature"],),
        batch_size=min(select["contexts"], tau["batch_size"]),
    )
    for node, settings in (("tau", after), ("select", within)):
        longest = max(settings.context_tokens)
        given = f"{node}.context_tokens={list(settings.context_tokens)}"
        if longest > row_tokens:
            raise UserError(f"{given} must not exceed data.row_tokens={row_tokens}; lower the one or raise the other")
        if longest + settings.new_tokens > target.max_positions:
            raise UserError(
                f"{given} and {node}.new_tokens={settings.new_tokens} exceed the target's context of "
                f"{target.max_positions}; lower them"
            )
    return after, within


def decoding_with(drafter: nn.Module, target: TargetModel) -> Drafter:
    """The method that decodes with a trained SPIRe or vanilla drafter, which is moved to where the target is."""
    if isinstance(drafter, SpireDrafter):
        return Spire(drafter)
    return Speculative(TargetModel(drafter.to(target.device).eval(), target.tokenizer))


def measuring(
    target: TargetModel,
    trained: Callable[[dict[str, Tensor]], nn.Module],
    contexts: Sequence[Sequence[int]],
    settings: TauSettings,
) -> Callable[[dict[str, Tensor]], tuple[float, float, float]]:
    """Return what training calls with its weights to learn their tau, with the bounds of its 95 % interval.

    `trained` makes the drafter of weights. The contexts [n, L] and settings are the same every time, so that the
    measurements are comparable.
    """
    return lambda weights: astuple(tau_of(target, decoding_with(trained(weights), target), contexts, settings))
