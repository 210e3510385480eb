"""Bringing ranks up, and how they go down."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from trainwright.engine.world import RankFailed, read_wchar, run_processes, run_threads, tune_allocator
from trainwright.problems import PlanError, Problem

RUNNERS = pytest.mark.parametrize("run", [run_threads, run_processes])


@RUNNERS
def test_results_come_in_rank_order(run):
    """The list's index is the rank."""
    results = run(lambda world: (world.rank, torch.full((2,), float(world.rank)), world.largest(world.rank)), 4)

    assert [(rank, 3) for rank in range(4)] == [(rank, largest) for rank, _, largest in results]
    assert all(torch.equal(torch.full((2,), float(rank)), tensor) for rank, tensor, _ in results)


@RUNNERS
def test_the_rank_that_failed_first_is_named_and_the_others_are_freed(run):
    """The others wait at a barrier that can never be complete."""

    def body(world):
        if world.rank == 1:
            raise PlanError(Problem("no such thing"))
        world.barrier()

    with pytest.raises(RankFailed, match="rank 1 failed: PlanError: no such thing") as caught:
        run(body, 3)

    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, PlanError)
    assert "in body" in caught.value.text


def test_a_killed_process_is_named():
    """A rank that dies without a word is the culprit, not those who miss it."""

    def body(world):
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        world.barrier()

    with pytest.raises(RankFailed, match=r"rank 2 failed: .* ended without a word") as caught:
        run_processes(body, 3)

    assert caught.value.rank == 2


def test_a_result_that_cannot_be_sent_is_told():
    """Results pass through a pipe."""
    with pytest.raises(RankFailed, match="rank 0 failed"):
        run_processes(lambda _world: lambda: None, 1)


def test_an_exception_that_cannot_be_carried_over_is_told_in_words():
    """Its text arrives though the object does not."""

    class Odd(Exception):  # noqa: N818 - a local class, which pickle cannot find
        pass

    def body(_world):
        raise Odd("strange")

    with pytest.raises(RankFailed, match="Odd: strange") as caught:
        run_processes(body, 1)

    assert caught.value.__cause__ is None


def test_processes_write_and_count_for_themselves():
    """A rank's own writes appear in its own counter."""
    if read_wchar() is None:
        pytest.skip("/proc/self/io is not readable here")

    def body(world):
        before = read_wchar()
        with Path(os.devnull).open("wb", buffering=0) as sink:
            sink.write(b"x" * 1_000 * (world.rank + 1))
        return read_wchar() - before

    assert [1_000, 2_000] == run_processes(body, 2)


def test_the_allocator_can_be_told_where_there_is_glibc():
    """Elsewhere the answer is no, and nothing breaks."""
    assert tune_allocator() in {True, False}


def program(text):
    """A fresh interpreter: what the parent has computed before matters here."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_ranks_live_though_the_parent_has_run_kernels_on_several_threads():
    """The pool of threads is not there in the child; a child that keeps to one thread does not miss it."""
    process = program(
        """
        import torch
        from trainwright.engine.world import run_processes
        torch.set_num_threads(2)
        a = torch.ones(600, 600, requires_grad=True)
        (a @ a).relu().sum().backward()
        torch.ones(1_000_000).exp().sum()
        def body(world):
            b = torch.ones(600, 600, requires_grad=True)
            (b @ b).relu().sum().backward()
            return torch.get_num_threads(), float(torch.ones(1_000_000).exp().sum()) > 1
        print(run_processes(body, 2, timeout_s=30))
        """
    )
    out, err = process.communicate(timeout=120)

    assert out.strip() == "[(1, True), (1, True)]", err


def test_a_fork_that_would_hang_is_refused(monkeypatch):
    """Where a trial child does not come back, the message says what to do."""
    monkeypatch.setattr("trainwright.engine.world._num_native_threads", lambda: 1_000)
    monkeypatch.setattr("trainwright.engine.world._fork_is_safe", lambda _threads: False)

    with pytest.raises(RuntimeError, match=r"torch.set_num_threads\(1\)"):
        run_processes(lambda world: world.rank, 2)


def test_an_interrupt_ends_all_ranks():
    """SIGINT to the parent: no rank is left."""
    process = program(
        """
        import os, time
        from trainwright.engine.world import run_processes
        def body(world):
            os.write(1, f"{os.getpid()}\\n".encode())
            time.sleep(60)
        try:
            run_processes(body, 2)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """
    )
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert out.strip() == "interrupted", err
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_ranks_die_with_a_parent_that_is_killed():
    """No rank is left behind to burn a core."""
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux ends children with their parent")
    process = program(
        """
        import os, time
        from trainwright.engine.world import run_processes
        run_processes(lambda world: (os.write(1, f"{os.getpid()}\\n".encode()), time.sleep(60)), 2)
        """
    )
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.05)

    assert not any(alive(pid) for pid in pids)


def alive(pid):
    """Whether a process still runs; one that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


@pytest.mark.slow
def test_torchrun_starts_the_same_world_and_restarts_it(tmp_path):
    """Two ranks under torchrun; one is killed at the first attempt, and the second attempt does not read the dead one's addresses."""
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            from trainwright.engine.world import from_environment
            world = from_environment(timeout_s=60)
            if world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(1, f"largest {world.largest(world.rank)}\\n".encode())  # one write: lines of two ranks do not mix
            world.close()
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)

    assert done.returncode == 0, done.stderr[-2_000:]
    assert done.stdout.count("largest 1") == 2
