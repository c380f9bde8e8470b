"""This rank's share of a model, by the plan that the model hands over: of every layer, or of its experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from vorox.backends.torch_engine.layouts.divided_parameters import ExpertParallelParameters, TensorParallelParameters
from vorox.backends.torch_engine.layouts.parameters import Parameters, fused_parts
from vorox.backends.torch_engine.parallel.divided_layers import divide_experts, divide_layers
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.backends.torch_engine.ranks.expert_parallel import ExpertGroup
from vorox.backends.torch_engine.ranks.plan import ParallelPlan, Style
from vorox.backends.torch_engine.ranks.tensor_parallel import TensorGroup
from vorox.models.optimizer_groups import Group
from vorox.models.spec import ModelSpec, ParameterSpec


class Share:
    """All of a model.

    Attributes:
        table: The parameters of this rank, with their shapes here.
        tensor_group: The ranks that share every matrix product, if any.
    """

    tensor_group: TensorGroup | None = None

    def __init__(self, spec: ModelSpec) -> None:
        self.table: tuple[ParameterSpec, ...] = spec.parameters

    def divide(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        """Make a model compute with its share.

        Args:
            module: The model, with the parameters of the share.
            parameters: Their names in the modules.
        """

    def place(self, inner: Parameters, groups: Mapping[str, Group]) -> Parameters:
        """Return the parameters of the share, in their optimizer groups, as parts of the whole ones."""
        del groups
        return inner


class TensorShare(Share):
    """A part of every layer."""

    def __init__(self, spec: ModelSpec, plan: ParallelPlan, group: TensorGroup) -> None:
        self._spec, self._plan, self._group = spec, plan, group
        self.table, self.tensor_group = plan.share(spec.parameters, group), group

    def divide(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        whole = {row.name: row for row in self._spec.parameters}
        names = {name: parts[0].name for name, parts in fused_parts(self._spec, self.table).items()}
        rows = {id(parameter): whole[names[name]] for name, parameter in parameters.items()}
        divide_layers(module, self._plan, rows, self._group)

    def place(self, inner: Parameters, groups: Mapping[str, Group]) -> Parameters:
        return TensorParallelParameters(inner, self._spec.parameters, groups, self._plan, self._group)


class ExpertShare(Share):
    """Some experts, and everything else; experts are last in buffers, so that their gradients are one range."""

    def __init__(self, spec: ModelSpec, plan: ParallelPlan, group: ExpertGroup) -> None:
        self._spec, self._plan, self._group = spec, plan, group
        self.table = tuple(sorted(plan.share(spec.parameters, group), key=lambda row: plan.is_divided(row.name)))

    def divide(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        stacks = {id(one) for name, one in parameters.items() if self._plan.styles.get(name) == Style.EXPERTS}
        divide_experts(module, stacks, self._group)

    def place(self, inner: Parameters, groups: Mapping[str, Group]) -> Parameters:
        return ExpertParallelParameters(inner, self._spec.parameters, groups, self._plan, self._group)


def share_of(
    spec: ModelSpec,
    ranks: Ranks,
    tensor_plan: Callable[[], ParallelPlan],
    expert_plan: Callable[[], ParallelPlan],
    *,
    divides_positions: bool = False,
) -> Share:
    """Return this rank's share of a model.

    Args:
        spec: The model.
        ranks: The layout.
        tensor_plan: Returns how tensor parallelism divides it.
        expert_plan: Returns how expert parallelism divides it.
        divides_positions: See ``TensorGroup``.

    Raises:
        ConfigError: The model cannot be divided.
    """
    if (tensor := TensorGroup.among(ranks, divides_positions=divides_positions)) is not None:
        return TensorShare(spec, tensor_plan(), tensor)
    experts = ExpertGroup.among(ranks)
    return Share(spec) if experts is None else ExpertShare(spec, expert_plan(), experts)
