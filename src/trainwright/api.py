"""The public names of Trainwright: what the command line does, from Python.

    plan = trainwright.load("plan.toml", **{"parallel.tensor.size": 4})
    trainwright.predict(plan)
    trainwright.prove(plan)
    trainwright.run(plan)

Each takes a Plan, the path of a plan file, or the name of a model in the catalog. Nothing heavy is loaded before it is needed;
torch by `prove` and `run` alone.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.problems import PlanError, Problem, nearest, raise_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainwright.engine.data import Corpus
    from trainwright.engine.run import Run
    from trainwright.engine.trial import Verdict
    from trainwright.plan.load import Command
    from trainwright.plan.plan import Plan
    from trainwright.predict.predict import Prediction
    from trainwright.prove.prove import Proof

COMMANDS = ("predict", "prove", "run")
"""What a default plan is made for."""

__all__ = ["Plan", "load", "predict", "prove", "run"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 (an attribute of a module may be anything)
    """`Plan`, loaded when it is first asked for."""
    if name == "Plan":
        from trainwright.plan.plan import Plan

        return Plan
    message = f"module 'trainwright.api' has no attribute '{name}'"
    raise AttributeError(message)


def load(plan: Plan | str | Path, command: Command = "predict", /, **overrides: Any) -> Plan:  # noqa: ANN401 - a setting may hold anything
    """Read a plan file, or make the default plan of a model in the catalog; `overrides` are settings by dotted path.

    `command` tells which default plan the name of a model means: 8 x h100-sxm for "predict", one process of this machine for "prove"
    and "run".
    Raises PlanError with every Problem.
    """
    from trainwright.plan.check import demand
    from trainwright.plan.load import load as read
    from trainwright.plan.plan import Plan

    _demand_words(plan, command)
    if isinstance(plan, Plan):
        return demand(plan.replace_settings(overrides) if overrides else plan)
    return read(plan, overrides, command)


def _demand_words(plan: object, command: str) -> None:
    """Raise PlanError for what is no plan and no way to name one, or for a command that is none."""
    from trainwright.plan.plan import Plan

    if not isinstance(plan, (Plan, str, Path)):
        raise PlanError(
            Problem(
                f"a {type(plan).__name__} is not a plan",
                given=repr(plan),
                allowed="a Plan, the path of a plan file, or the name of a model",
                attempt='trainwright.predict("llama-3-8b")',
            )
        )
    if command not in COMMANDS:
        raise PlanError(
            Problem("there is no such command", path="command", given=command, allowed=COMMANDS, attempt=nearest(str(command), COMMANDS))
        )


def predict(plan: Plan | str | Path, **overrides: Any) -> Prediction:  # noqa: ANN401 - a setting may hold anything
    """What the plan costs, before it runs: time, memory, wire, money."""
    from trainwright.predict.predict import predict as priced

    return priced(load(plan, "predict", **overrides))


def prove(
    plan: Plan | str | Path,
    *,
    max_ranks: int | None = None,
    processes: bool = False,
    dtype: str = "fp64",
    **overrides: Any,  # noqa: ANN401 - a setting may hold anything
) -> Proof:
    """Execute the shrunk plan and compare it with the unsharded reference.

    max_ranks   use the largest sizes whose product is at most this; None: two of every axis in use
    processes   ranks are processes, so that the operating system counts bytes too; else threads
    dtype       "fp64", or "fp32" with gradients to 2e-5

    Raises PlanError where the plan or an option cannot be proved.
    """
    from trainwright.prove.prove import TOLERANCES
    from trainwright.prove.prove import prove as proved
    from trainwright.prove.shrink import demand_ranks

    plan = load(plan, "prove", **overrides)
    demand_ranks(plan, max_ranks)
    if dtype not in TOLERANCES:
        raise PlanError(
            Problem("a proof has no tolerance for this type", path="dtype", given=dtype, allowed=tuple(TOLERANCES), attempt='dtype="fp64"')
        )
    return proved(plan, max_ranks=max_ranks, processes=processes, dtype=dtype)


def run(
    plan: Plan | str | Path,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    stop_after: int | None = None,
    profile: bool = False,
    progress: bool = False,
    told: Callable[[Prediction], None] | None = None,
    **overrides: Any,  # noqa: ANN401 - a setting may hold anything
) -> Run:
    """Train for real, and put what was measured beside what was predicted.

    folder      where metrics and traces go; None: runs/NAME/TIME in the current folder
    resume      go on from the newest checkpoint
    stop_after  stop when so many steps are done, counted from the beginning of the run
    profile     write a trace of the recorded steps
    told        called with the prediction before the first step; what it raises ends the run

    A plan for the cluster `local` is run on processes of this machine, which is measured first; any other by ranks that torchrun started.
    Raises PlanError where plan, text, checkpoints or number of ranks do not allow it.
    """
    from trainwright.engine.launch import launch
    from trainwright.engine.run import Run
    from trainwright.engine.train import Options, train

    plan = load(plan, "run", **overrides)
    corpus = _ready(plan, resume=resume)
    prediction = predict(_measured(plan))
    if told is not None:
        told(prediction)
    options = Options(folder=_folder(plan, folder), resume=resume, stop_after=stop_after, profile=profile, progress=progress)
    outcome = launch(plan, lambda world: train(world, plan, corpus, options))
    return Run(plan=plan, outcome=outcome, prediction=prediction.to_json())


def check(plan: Plan | str | Path) -> list[Verdict]:
    """Try a plan for a few steps on one batch: whether its loss falls, its state is saved and restored, and all its parameters learn."""
    from trainwright.engine.launch import launch
    from trainwright.engine.trial import trial
    from trainwright.engine.world import is_launched

    plan = load(plan, "run")
    corpus = _ready(replace(plan, run=replace(plan.run, checkpoint=None)), resume=False)
    with tempfile.TemporaryDirectory(prefix="trainwright-check-", dir="." if is_launched() else None) as scratch:
        return launch(plan, lambda world: trial(world, plan, corpus, Path(scratch)))


def _ready(plan: Plan, *, resume: bool) -> Corpus:
    """Look at everything outside the plan that a run needs, and read the text. Raises PlanError."""
    from trainwright.engine.launch import demand_ranks
    from trainwright.engine.train import corpus_of, prepare_checkpoints
    from trainwright.plan.check import check_run

    raise_all(problem.at(*plan.source.place(problem.path or "")) for problem in check_run(plan))
    demand_ranks(plan)
    corpus = corpus_of(plan)
    prepare_checkpoints(plan, resume=resume)
    return corpus


def _measured(plan: Plan) -> Plan:
    """The plan on this machine as it was measured, if it is for this machine."""
    from trainwright.engine.launch import launch
    from trainwright.engine.measure import cluster_of, measure, roomy

    if not plan.cluster.is_local:
        return plan
    guessed = replace(plan, cluster=roomy(plan.cluster, plan.num_devices))
    if not predict(guessed).fits:
        return guessed  # measuring takes memory too
    figures = launch(plan, lambda world: measure(world, plan))
    return replace(plan, cluster=cluster_of(plan.cluster, figures))


def _folder(plan: Plan, asked: str | Path | None) -> Path:
    """The folder of a run, made by the rank that writes into it. Raises PlanError if it cannot be."""
    from trainwright.engine.launch import speaks

    name = plan.source.file.stem if plan.source.file is not None else plan.model.name
    folder = Path(asked) if asked is not None else Path("runs") / name / time.strftime("%Y%m%d-%H%M%S")
    if not speaks():
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PlanError(
            Problem(f"the folder {folder} cannot be written: {error.strerror or error}", given=str(folder), attempt="--out FOLDER")
        ) from None
    return folder
