"""The engine leaves the process as it found it, and the executor never learns which strategy asked."""

from __future__ import annotations

import ast

import pytest

from architecture.source import modules, modules_under
from trainwright.registry import Registry

GLOBAL_STATE = {
    "manual_seed",
    "seed",
    "set_rng_state",
    "set_default_dtype",
    "set_default_device",
    "set_default_tensor_type",
    "set_grad_enabled",
    "use_deterministic_algorithms",
    "set_float32_matmul_precision",
}
DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}
DRAWS_IN_PLACE = {"normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"}


def is_torch(value: ast.expr) -> bool:
    """Tell torch itself and its random modules from a Generator object, whose own seed may be set."""
    text = ast.unparse(value)
    return text in {"torch", "torch.random", "torch.cuda", "torch.cuda.random"}


def fault(call: ast.Call) -> str | None:
    """What a call does to, or takes from, the state that all threads of a process share."""
    if not isinstance(call.func, ast.Attribute):
        return None
    name = call.func.attr
    own_generator = any(keyword.arg == "generator" for keyword in call.keywords)
    if is_torch(call.func.value) and name in GLOBAL_STATE:
        return f"torch.{name} changes the whole process"
    if is_torch(call.func.value) and name in DRAWS and not own_generator:
        return f"torch.{name} draws from the default generator"
    if name in DRAWS_IN_PLACE and not own_generator:
        return f"{name} draws from the default generator"
    if name in {"dropout", "Dropout"}:
        return f"{name} draws from the default generator"
    return None


def test_the_engine_touches_no_state_of_the_process():
    """Ranks may be threads of one process: a default generator or default dtype would be shared by all of them."""
    faults = [
        f"{module.at(node)}: {found}"
        for module in modules_under("trainwright.engine")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and (found := fault(node)) is not None
    ]

    assert faults == []


@pytest.mark.parametrize(
    "line",
    ["torch.manual_seed(1)", "torch.set_default_dtype(torch.float64)", "torch.randn(3)", "x.normal_()", "F.dropout(x, 0.1)"],
)
def test_the_lint_sees_planted_faults(line):
    """Each way to share state is found."""
    (call,) = [node for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call)]

    assert fault(call) is not None


def test_the_executor_does_not_know_the_strategies():
    """It sees layouts and groups; no text in it equals a strategy's name, and it imports none of them."""
    (executor,) = [module for module in modules() if module.name == "trainwright.engine.execute"]
    names = {*Registry("trainwright.strategies").names(), "sequence", "offload"}
    mentions = [
        executor.at(node)
        for node in ast.walk(executor.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip(" .#+:") in names
    ]
    imports = [imported for _, imported in executor.imports() if imported.startswith("trainwright.strategies")]

    assert "zero" in names
    assert (mentions, imports) == ([], [])
