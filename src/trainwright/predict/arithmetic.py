"""How much arithmetic a step is: what the model asks for, and what the devices execute.

Model FLOPs count matrix products and attention, forward once and backward twice, nothing that is run again, and a causal mask as half.
Executed FLOPs are those of the Program's actions: recomputed passes, the scores that fused attention computes again in its backward, and
padded vocabulary too. Left out: norms, activations, softmax, the optimizer (below one percent).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

from trainwright.ir.action import Action, Compute
from trainwright.ir.program import Program
from trainwright.ir.work import OpKind
from trainwright.predict.slopes import label
from trainwright.spec.model import Model
from trainwright.units import Flops

FlopsOf: TypeAlias = Callable[[Compute], Iterable[tuple[str, Flops]]]

ATTENTION = (OpKind.ATTENTION_FORWARD, OpKind.ATTENTION_BACKWARD)


def matrix_parameters(model: Model) -> int:
    """Parameters that every token is multiplied with.

    All matrices, the head's too where it is tied; not the embedding, which is looked up.
    """
    num_feed_matrices = 3 if model.gated else 2
    heads = model.num_heads * model.head_width
    block = model.width * (model.qkv_width + heads + num_feed_matrices * model.ffn_width)
    return model.num_layers * block + model.vocab * model.width


def executed_flops(program: Program) -> Counter[str]:
    """FLOPs that all ranks execute in a step, by class of action."""
    return _summed(program, lambda action: ((label(action), op.flops) for op in action.work.ops))


def recomputed_flops(program: Program) -> Counter[str]:
    """FLOPs of forward passes that are run again, with attention counted in full."""
    return _summed(
        program,
        lambda action: (
            (label(action), op.flops * (2 if op.kind in ATTENTION else 1)) for op in action.work.ops if action.site.phase == "re"
        ),
    )


def _summed(program: Program, flops_of: FlopsOf) -> Counter[str]:
    by_template = {name: _template(actions, flops_of) for name, actions in program.templates.items()}
    sums: Counter[str] = Counter()
    for role in program.roles:
        for name, times in Counter(run.template for run in role.runs).items():
            for what, flops in by_template[name].items():
                sums[what] += flops * times * role.multiplicity
    return sums


def _template(actions: tuple[Action, ...], flops_of: FlopsOf) -> Counter[str]:
    sums: Counter[str] = Counter()
    for action in actions:
        if isinstance(action, Compute):
            for what, flops in flops_of(action):
                if flops:
                    sums[what] += flops
    return sums
