"""tau around a training: the table after it, and the measurements within it by which the best weights are chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from spectrain.decoding import Drafter, Sampling, TargetModel
from spectrain.decoding.errors import UserError, check_whole
from spectrain.measure.tau import TauSettings, tau_of
from spectrain.training.selection import Tau


def tau_settings(cfg: DictConfig, target: TargetModel) -> TauSettings:
    """What is measured after training, checked before it.

    Raises:
        UserError: a number makes no sense, or contexts and new tokens do not fit the rows and the target.
    """
    settings = TauSettings(**{k: tuple(v) if OmegaConf.is_list(v) else v for k, v in cfg.tau.items()})
    check_fits("tau", settings, cfg, target)
    return settings


def select_settings(cfg: DictConfig, target: TargetModel) -> TauSettings:
    """What is measured within training, checked before it.

    Raises:
        UserError: see `tau_settings`.
    """
    select = cfg.select
    for name in ("contexts", "context_tokens", "new_tokens"):
        check_whole(f"select.{name}", select[name], 1)
    Sampling(temperature=select.temperature)
    settings = TauSettings(
        context_tokens=(select.context_tokens,),
        contexts=select.contexts,
        new_tokens=select.new_tokens,
        temperatures=(select.temperature,),
        batch_size=min(select.contexts, cfg.tau.batch_size),
    )
    check_fits("select", settings, cfg, target)
    return settings


def check_fits(node: str, settings: TauSettings, cfg: DictConfig, target: TargetModel) -> None:
    """Raises UserError where contexts of the node `node` are longer than rows, or leave the target no room."""
    longest = max(settings.context_tokens)
    given = f"{node}.context_tokens={list(settings.context_tokens)}"
    if longest > cfg.data.row_tokens:
        raise UserError(
            f"{given} must not exceed data.row_tokens={cfg.data.row_tokens}; lower the one or raise the other"
        )
    if longest + settings.new_tokens > target.max_positions:
        raise UserError(
            f"{given} and {node}.new_tokens={settings.new_tokens} exceed the target's context of "
            f"{target.max_positions}; lower them"
        )


def measuring(
    target: TargetModel,
    build: Callable[[dict[str, Tensor]], Drafter],
    contexts: Sequence[Sequence[int]],
    settings: TauSettings,
) -> Callable[[dict[str, Tensor]], Tau]:
    """What training calls with its weights to learn their tau.

    Args:
        target: the target.
        build: the method with a drafter of these weights.
        contexts: [n, L] tokens that no training saw.
        settings: how many, how long; the same every time, so that measurements are comparable.
    """

    def measure(weights: dict[str, Tensor]) -> Tau:
        found = tau_of(target, build(weights), contexts, settings)
        return Tau(found.value, found.low, found.high)

    return measure
