"""CPU-seconds of `trainwright predict` on a very large plan, the whole process from its start to its end.

    python benchmarks/predict.py [--runs 5] [--plan plans/llama-3-405b-16384-h100.toml] [--json FILE]

A process is started anew for each run; what the operating system counted for it (user and system time) is read when it ends. The minimum
over the runs is given, since other work on the machine can only add to it. One more process reports on itself where the time goes, and
that no torch was imported.

Exits with 1 if the command takes a CPU-second or more, or imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

BAR_S = 1.0
"""CPU-seconds that the command must stay below."""

ROOT = Path(__file__).resolve().parent.parent

PARTS = """
import sys, time
marks = [("start", time.process_time())]
def mark(name):
    marks.append((name, time.process_time()))
from trainwright.plan.load import load
from trainwright.predict import predict as predicting
mark("import")
plan = load(sys.argv[1], {})
mark("load")
lower, simulate = predicting.lower, predicting.simulate
def timed(function, name):
    def call(*given, **named):
        begin = time.process_time()
        result = function(*given, **named)
        spent[name] = spent.get(name, 0.0) + time.process_time() - begin
        return result
    return call
spent = {}
predicting.lower, predicting.simulate = timed(lower, "lower"), timed(simulate, "simulate")
begin = time.process_time()
prediction = predicting.predict(plan)
spent["price, memory, report"] = time.process_time() - begin - sum(spent.values())
begin = time.process_time()
prediction.to_json()
spent["document"] = time.process_time() - begin
import json
parts = {"interpreter": marks[0][1]} | {name: at - before for (_, before), (name, at) in zip(marks, marks[1:])} | spent
print(json.dumps({"parts": parts, "torch": any(name.split(".")[0] == "torch" for name in sys.modules)}))
"""


def environment() -> dict[str, str]:
    """One thread, and this checkout's sources first."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def cpu_s(*arguments: str) -> float:
    """CPU-seconds of one run of trainwright; its output is thrown away."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trainwright", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment(), cwd=ROOT
    )
    assert process.stderr is not None
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in {0, 3}:  # 3: the plan does not fit, which is an answer too
        raise RuntimeError(f"trainwright {' '.join(arguments)} ended with {process.returncode}: {said}")
    return usage.ru_utime + usage.ru_stime


def parts_of(plan: str) -> tuple[dict[str, float], bool]:
    """CPU-seconds of each part, and whether torch was imported."""
    done = subprocess.run([sys.executable, "-c", PARTS, plan], capture_output=True, text=True, check=True, env=environment(), cwd=ROOT)
    said = json.loads(done.stdout)
    return said["parts"], said["torch"]


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="processes of each command (default 5)")
    parser.add_argument("--plan", default="plans/llama-3-405b-16384-h100.toml")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run's seconds")
    arguments = parser.parse_args()
    commands = {"predict": ["predict", arguments.plan, "--json"], "--help": ["--help"]}
    seen: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(arguments.runs):
        for name, command in commands.items():
            seen[name].append(cpu_s(*command))
    parts, has_torch = min((parts_of(arguments.plan) for _ in range(arguments.runs)), key=lambda one: sum(one[0].values()))
    for name, runs in seen.items():
        print(f"trainwright {' '.join(commands[name])}: {min(runs):.3f} CPU-seconds (least of {len(runs)}; most {max(runs):.3f})")
    print("where predict spends it: " + ", ".join(f"{name} {value:.3f}" for name, value in parts.items()))
    print("torch imported: " + ("yes" if has_torch else "no"))
    if arguments.json:
        arguments.json.write_text(json.dumps({"runs_s": seen, "parts_s": parts, "torch": has_torch}, indent=1) + "\n", encoding="utf-8")
    return int(min(seen["predict"]) >= BAR_S or has_torch)


if __name__ == "__main__":
    sys.exit(main())
