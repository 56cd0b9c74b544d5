"""The squares of one chunk of samples after the other, each parameter's by the fastest way that is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ewc_finetune.choices import KfacForm
from ewc_finetune.curvature import fallback
from ewc_finetune.curvature.backward_pass import RuledPass, Squares, differentiable
from ewc_finetune.curvature.batch_dims import CourseChangedError
from ewc_finetune.curvature.kfac_factors import BlockSums, KfacLayer
from ewc_finetune.curvature.per_sample_gradients import Scratch, budget
from ewc_finetune.curvature.plan import GradientPlan, agree, make_plan, narrow
from ewc_finetune.errors import ArchitectureError, counted, first_line
from ewc_finetune.likelihood.output_fisher import OutputFisher
from ewc_finetune.modules.batch import Inputs, call, count, each, signature, take, tensors
from ewc_finetune.modules.devices import out_of_memory

# The most plans that are kept, of which there is one for each length that sequences have.
_PLANS = 256


class Engine:
    """Computes sums over samples of squared per-sample gradients.

    Args:
        model: The model, in eval mode.
        parameters: The parameters to differentiate by.
        rules: Whether layer rules may be used.

    Attributes:
        layers: Weights of which the whole block is collected, not the squares; none unless they are put in.
        form: What is done there with several positions.
        changed: Samples for which the model did something else than it was planned for.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], rules: bool) -> None:
        self.model = model
        self.parameters = parameters
        self.changed = 0
        self.layers: dict[str, KfacLayer] = {}
        self.form: KfacForm = "expand"
        self._rules = rules
        self._plans: dict[object, GradientPlan] = {}
        self._scratch = Scratch()
        self._refusal: str | None = None
        self._chunks = 0
        self._samples = 0
        self._generator = torch.Generator().manual_seed(0)

    def plan(self, inputs: Inputs) -> GradientPlan:
        """Return the plan for samples of this shape; made on the first of them (see `make_plan`)."""
        key = signature(inputs)
        if key not in self._plans:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[key] = make_plan(self.model, self.parameters, inputs, self._rules)
        return self._plans[key]

    def good_size(self, inputs: Inputs) -> int:
        """Return how many samples of this shape are small enough to be worth no more than one chunk."""
        plan = self.plan(inputs)
        if plan.rest or any(isinstance(module, torch.jit.ScriptModule) for module in self.model.modules()):
            return 1  # the fallback has chunks of its own, and what TorchScript allocates is not seen
        return budget(tensors(inputs)[0].device) // (4 * max(plan.elements, 1))

    def squares(
        self, inputs: Inputs, fisher_of: Callable[[Tensor], OutputFisher]
    ) -> tuple[Tensor, Squares, list[BlockSums]]:
        """Run one chunk through the model.

        Args:
            inputs: The samples.
            fisher_of: Gives the Fisher at the model's outputs; called once.

        Returns:
            The outputs; for each parameter that they depend on the squares, summed over the samples, and their sum
            over the parameter for each sample; and the blocks of `layers`.

        Raises:
            ArchitectureError: if the layer rules prove wrong for a sample when some have already gone by them, or a
                block cannot be had of these samples.
        """
        plan = self.plan(inputs)
        rest = {name: self.parameters[name] for name in plan.rest}
        ruled = {name: self.parameters[name] for name in plan.ruled}
        # Often at first, then ever more rarely: at chunk 1, 2, 3, 4, 8, 16...
        self._chunks += 1
        checked = None
        if ruled and (self._chunks < 4 or self._chunks & (self._chunks - 1) == 0):
            checked = int(torch.randint(count(inputs), (), generator=self._generator))
        try:
            outputs, fisher, squares, blocks = self._by_rules(plan, ruled, inputs, fisher_of, checked)
        except CourseChangedError:
            self.changed += count(inputs)
            rest, ruled, checked, blocks = dict(self.parameters), {}, None, []
            outputs = self._forward(plan, inputs)
            fisher, squares = fisher_of(outputs), {}
        if checked is not None:
            dead = {name: self.parameters[name] for name in plan.dead}
            parts = {name: part[checked] for name, (_, part) in squares.items()}
            for block in blocks:
                for name, norm in zip((block.layer.weight, block.layer.bias), block.norms, strict=True):
                    if name is not None:
                        parts[name] = torch.tensor(norm, dtype=torch.float64)
            wrong = self._wrong(plan, {**ruled, **dead}, inputs, fisher, checked, parts)
            if wrong:
                rest |= {name: self.parameters[name] for name in wrong}
                self._demote(wrong)
        lost = self.layers.keys() - {block.layer.weight for block in blocks}
        lost |= {name for name, layer in self.layers.items() if {name, layer.bias} & rest.keys()}
        if lost:
            raise ArchitectureError(
                f"{', '.join(sorted(lost)[:3])}: the model does something else with these weights for samples "
                f"{self._samples} to {self._samples + count(inputs) - 1} than for the first ones, so there is no K-FAC "
                "block of all samples. Use the diagonal, or exclude them"
            )
        if rest:
            squares |= self._fall_back(plan, rest, inputs, fisher)
        self._samples += count(inputs)
        return outputs, squares, blocks

    def _by_rules(
        self,
        plan: GradientPlan,
        ruled: Mapping[str, Tensor],
        inputs: Inputs,
        fisher_of: Callable[[Tensor], OutputFisher],
        checked: int | None,
    ) -> tuple[Tensor, OutputFisher, Squares, list[BlockSums]]:
        if not ruled:
            outputs = self._forward(plan, inputs)
            return outputs, fisher_of(outputs), {}, []
        # Parameters that had no use before are watched too, in case they have one now.
        watched = {**ruled, **{name: self.parameters[name] for name in plan.unused}}
        mask = None if isinstance(inputs, Tensor) else inputs.get("attention_mask")
        wanted = {
            name: partial(BlockSums, layer, form=self.form, checked=checked, mask=mask)
            for name, layer in self.layers.items()
        }
        with (
            differentiable(self.model, watched),
            RuledPass(
                self.model,
                watched,
                plan.course,
                _fresh(plan, inputs),
                self._scratch,
                plan.forms,
                wanted,
                plan.repeated,
            ) as passed,
        ):
            fisher = fisher_of(passed.outputs)
            return passed.outputs.detach(), fisher, passed.squares(fisher), passed.blocks

    def _forward(self, plan: GradientPlan, inputs: Inputs) -> Tensor:
        # Not under no_grad: a model may take gradients of its own on the way.
        with differentiable(self.model, {}):
            return call(self.model, _fresh(plan, inputs)).detach()

    def _wrong(
        self,
        plan: GradientPlan,
        ruled: Mapping[str, Tensor],
        inputs: Inputs,
        fisher: OutputFisher,
        n: int,
        by_rules: Mapping[str, Tensor],
    ) -> list[str]:
        """Compare sample n of the chunk with autograd; return the parameters whose part `by_rules` differs."""
        one = slice(n, n + 1)
        truth = fallback.one_at_a_time(self.model, ruled, _fresh(plan, take(inputs, one)), fisher.vectors(one))
        parts = {name: part[0] for name, (_, part) in truth.items()}
        largest = torch.stack([part.double() for part in parts.values()]).max()
        zero = torch.zeros((), device=largest.device)
        return [
            name
            for name, part in parts.items()
            if not agree(by_rules.get(name, zero), part, ruled[name].dtype, largest, slack=10)
        ]

    def _demote(self, wrong: Sequence[str]) -> None:
        """Take parameters away from the rules, as long as nothing has been computed by them."""
        if self._samples:
            raise ArchitectureError(
                f"by layer rules the gradients of {', '.join(wrong[:3])} were right for the first samples and are "
                f"wrong for one after sample {self._samples}: the model treats samples differently in a way that does "
                "not show. Run again without rules (--no-rules, or rules=False), which is slower"
            )
        for key, plan in self._plans.items():
            self._plans[key] = replace(
                plan,
                ruled=tuple(name for name in plan.ruled if name not in wrong),
                dead=tuple(name for name in plan.dead if name not in wrong),
                rest={**plan.rest, **dict.fromkeys(wrong, "has a rule that differs from autograd")},
                course=narrow(plan.course, set(self.parameters) - set(wrong)),
            )

    def _fall_back(
        self, plan: GradientPlan, parameters: Mapping[str, Tensor], inputs: Inputs, fisher: OutputFisher
    ) -> Squares:
        self._refusal = self._refusal or plan.refusal
        total: Squares = {}
        step = fallback.chunk_size(parameters)
        for start in range(0, count(inputs), step):
            samples = slice(start, start + step)
            part = self._part(plan, parameters, take(inputs, samples), fisher.vectors(samples))
            for name, (squares, by_sample) in part.items():
                if name in total:
                    total[name] = total[name][0].add_(squares), torch.cat([total[name][1], by_sample])
                else:
                    total[name] = squares, by_sample
        return total

    def _part(self, plan: GradientPlan, parameters: Mapping[str, Tensor], inputs: Inputs, vectors: Tensor) -> Squares:
        if self._refusal is None:
            try:
                return fallback.vectorised(self.model, parameters, _fresh(plan, inputs), vectors)
            except Exception as error:
                if out_of_memory(error):
                    raise
                self._refusal = first_line(error)
        return fallback.one_at_a_time(self.model, parameters, _fresh(plan, inputs), vectors)

    def describe(self, unreached: Iterable[str]) -> str:
        """Say which parameters went which way, for people; `unreached` are those without any gradient."""
        ruled = dict.fromkeys(name for plan in self._plans.values() for name in plan.ruled)
        rest = {name: reason for plan in self._plans.values() for name, reason in plan.rest.items()}
        zero = dict.fromkeys(unreached)
        parts = []
        if ruled:
            parts.append(f"layer rules for {_count(ruled)}")
        if self.layers:
            parts.append(f"of which {counted(len(self.layers), 'layer')} with K-FAC blocks ({self.form})")
        if rest:
            way = "one sample at a time" if self._refusal else "vectorised (torch.func)"
            reasons = "; ".join(f"{name} {reason}" for name, reason in list(rest.items())[:3])
            more = "; ..." if len(rest) > 3 else ""
            if not self._rules:
                reasons, more = "rules are off", ""
            refused = f"; torch.func refused: {self._refusal}" if self._refusal else ""
            parts.append(f"per-sample gradients, {way}, for {_count(rest)} ({reasons}{more}{refused})")
        if zero:
            parts.append(f"zero for {_count(zero)} that no output depends on ({', '.join(list(zero)[:3])})")
        if self.changed:
            parts.append(f"the fallback for {counted(self.changed, 'sample')}, for which the model took another course")
        return "gradients: " + ", ".join(parts)


def _fresh(plan: GradientPlan, inputs: Inputs) -> Inputs:
    """Return a copy, if the model would change it."""
    return each(torch.clone, inputs) if plan.mutates else inputs


def _count(names: Mapping[str, object]) -> str:
    return f"{len(names)} parameters" if len(names) != 1 else next(iter(names))
