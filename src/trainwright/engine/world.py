"""The world: the ranks of a run, and three ways to bring them up.

    run_threads         ranks are threads of this process: instant, for proofs; they share one interpreter
    run_processes       ranks are forked processes over gloo: each has a core of its own, and the operating system counts its bytes
    from_environment    this process is one rank of many that torchrun started

Rules that threads as ranks depend on: engine code never uses the default random generator or the default dtype.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import selectors
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

from trainwright.engine.transport_gloo import GlooTransport
from trainwright.engine.transport_threads import Switchboard
from trainwright.engine.wire import DEFAULT_TIMEOUT_S, WORLD, Wire, WireError
from trainwright.units import Seconds

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

_ORPHAN_S = 5.0
"""How long the other ranks may take to say what they saw after one has failed."""

_MALLOC_TRIM_THRESHOLD, _MALLOC_MMAP_THRESHOLD = -1, -3  # glibc <malloc.h>: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_LARGE_BYTES = 1 << 30
_PARENT_DEATH_SIGNAL = 1  # Linux <sys/prctl.h>: PR_SET_PDEATHSIG


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One rank's view of the run. `device` is "cpu" or "cuda:N"; `is_process` says that no other rank shares this process."""

    rank: int
    size: int
    wire: Wire
    device: str = "cpu"
    is_process: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.size))

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self.largest(0)

    def largest(self, value: int) -> int:
        """The largest `value` over all ranks."""
        place = torch.tensor([value], dtype=torch.int64, device=self.device)
        self.wire.start_all_reduce(place, self.ranks, "max", channel=WORLD).wait()
        return int(place.item())

    def close(self) -> None:
        """Leave the world."""
        self.wire.transport.close()


class RankFailed(RuntimeError):  # noqa: N818 - named for what happened
    """A rank raised; `rank` names it, `text` holds its traceback. The exception itself is the cause, where it could be carried over."""

    def __init__(self, rank: int, reason: str, text: str = "") -> None:
        """Say which rank failed, and why."""
        super().__init__(f"rank {rank} failed: {reason}")
        self.rank = rank
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """What a rank says when it fails."""

    reason: str
    text: str
    error: BaseException | None
    is_consequence: bool


def run_threads(body: Callable[[World], Result], size: int, timeout_s: Seconds = DEFAULT_TIMEOUT_S) -> list[Result]:
    """Run `body` on `size` ranks, threads of this process, and return their results in rank order.

    When one raises, the others are freed from whatever they wait for, and RankFailed names the first one.
    """
    board = Switchboard(size)
    results: dict[int, Result] = {}
    failures: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            results[rank] = body(World(rank=rank, size=size, wire=Wire(board.transport(rank), timeout_s)))
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures[rank] = error
            board.abort(rank, _reason(error))

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        board.abort(-1, "interrupted")
        raise
    if board.failed is not None:
        rank = board.failed[0]
        error = failures[rank]
        raise RankFailed(rank, _reason(error), "".join(traceback.format_exception(error))) from error
    return [results[rank] for rank in range(size)]


def run_processes(body: Callable[[World], Result], size: int, timeout_s: Seconds = DEFAULT_TIMEOUT_S) -> list[Result]:
    """Run `body` on `size` ranks, forked processes over gloo on the loopback device, and return their results in rank order.

    Forking after `import torch` costs a few hundredths of a second a rank instead of seconds. Threads do not survive a fork: a
    parent that has run a kernel on several threads leaves its children a pool that hangs when used. Each child therefore begins by
    restricting itself to one thread, and where this process has threads beyond Python's own, a child is tried first. Results come back
    through pipes, so they must be picklable. When a rank fails the others are ended and RankFailed names it; an interrupt ends all.
    """
    _refuse_unsafe_fork()
    with tempfile.TemporaryDirectory(prefix="trainwright-") as folder:
        ranks = [_Rank.start(body, rank, size, folder, timeout_s) for rank in range(size)]
        try:
            return _collect(ranks)
        finally:
            for one in ranks:
                one.end()


def from_environment(timeout_s: Seconds = DEFAULT_TIMEOUT_S) -> World:
    """Join the world that torchrun describes in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Keys in the store are kept apart by the attempt: torchrun keeps one store across restarts, and gloo would read the addresses of
    processes that are dead (pytorch/pytorch#135712). On several machines the attempt is torchrun's own count, which its agents must agree
    on. NCCL where this rank has a GPU, gloo otherwise.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(host, port, size, is_master=is_master, timeout=timeout, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"trainwright-attempt-{attempt}", store)
    gpu = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available() and gpu < torch.cuda.device_count():
        from trainwright.engine.transport_nccl import NcclWire

        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", store=own, rank=rank, world_size=size, timeout=timeout)
        return World(rank=rank, size=size, wire=NcclWire(rank, size, timeout_s), device=f"cuda:{gpu}", is_process=True)
    tune_allocator()
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timeout)
    return World(rank=rank, size=size, wire=Wire(GlooTransport(rank, size), timeout_s), is_process=True)


def is_launched() -> bool:
    """Whether torchrun has started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def read_wchar() -> int | None:
    """Bytes that this process has handed to the operating system by write calls so far, sockets, files and terminals alike.

    None where the system does not tell: it is Linux' /proc/self/io, which some containers hide.
    """
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar:")), None)


def tune_allocator() -> bool:
    """Keep freed memory in the process instead of giving it back to the system after each use; whether that could be set.

    A buffer of many MiB is otherwise mapped afresh each time and pays a page fault for every 4 KiB. Only glibc knows the call.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MALLOC_MMAP_THRESHOLD, _LARGE_BYTES)) and bool(mallopt(_MALLOC_TRIM_THRESHOLD, _LARGE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank(Generic[Result]):
    """A forked rank, seen from its parent."""

    rank: int
    pid: int
    pipe: int

    @staticmethod
    def start(body: Callable[[World], Result], rank: int, size: int, folder: str, timeout_s: Seconds) -> _Rank[Result]:
        sys.stdout.flush()
        sys.stderr.flush()
        read_end, write_end = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            _live(body, rank, size, folder, timeout_s, write_end, parent)
        os.close(write_end)
        return _Rank(rank=rank, pid=pid, pipe=read_end)

    def end(self) -> None:
        """Kill the process if it still runs, and reap it."""
        os.close(self.pipe)
        ended, _ = os.waitpid(self.pid, os.WNOHANG)
        if ended == 0:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _live(body: Callable[[World], Any], rank: int, size: int, folder: str, timeout_s: Seconds, pipe: int, parent: int) -> None:
    """The whole life of a forked rank; never returns. Ends with `os._exit`: a broken process group may not survive a tidy exit."""
    code = 0
    said: tuple[bool, Any]
    try:
        _end_with_parent(parent)
        torch.set_num_threads(1)
        tune_allocator()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=FileStore(f"{folder}/store", size), rank=rank, world_size=size, timeout=timeout)
        world = World(rank=rank, size=size, wire=Wire(GlooTransport(rank, size), timeout_s), is_process=True)
        said = True, body(world)
        world.barrier()
    except KeyboardInterrupt:
        _leave(130)
    except BaseException as error:  # noqa: BLE001 - told to the parent, which raises it
        code = 1
        said = False, _failure(error)
    try:
        content = pickle.dumps(said)
    except Exception as error:  # noqa: BLE001 - a result that cannot be sent is a failure to tell, not one to die of
        code = 1
        content = pickle.dumps((False, _failure(error)))
    with os.fdopen(pipe, "wb") as out:
        out.write(content)
    _leave(code)


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(code)


def _failure(error: BaseException) -> _Failure:
    text = "".join(traceback.format_exception(error))
    carried: BaseException | None = error
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - an exception that cannot be carried over is told in words
        carried = None
    return _Failure(reason=_reason(error), text=text, error=carried, is_consequence=isinstance(error, WireError))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _collect(ranks: list[_Rank[Result]]) -> list[Result]:
    """Read what every rank says. After the first failure the others have a moment to say theirs; the likely cause is raised."""
    said: dict[int, bytearray] = {one.rank: bytearray() for one in ranks}
    results: dict[int, Result] = {}
    failures: dict[int, _Failure] = {}
    deadline = float("inf")
    with selectors.DefaultSelector() as selector:
        for one in ranks:
            selector.register(one.pipe, selectors.EVENT_READ, one)
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(None if deadline == float("inf") else max(0.0, deadline - time.monotonic())):
                one = key.data
                content = os.read(one.pipe, 1 << 20)
                if content:
                    said[one.rank] += content
                    continue
                selector.unregister(one.pipe)
                succeeded, what = _understand(bytes(said[one.rank]), one.pid)
                if succeeded:
                    results[one.rank] = what
                else:
                    failures[one.rank] = what
                    deadline = min(deadline, time.monotonic() + _ORPHAN_S)
    if failures:
        rank = min(failures, key=lambda failed: (failures[failed].is_consequence, failed))
        failure = failures[rank]
        raise RankFailed(rank, failure.reason, failure.text) from failure.error
    return [results[one.rank] for one in ranks]


def _understand(content: bytes, pid: int) -> tuple[bool, Any]:
    if content:
        return pickle.loads(content)  # type: ignore[no-any-return]  # noqa: S301 - written by our own child
    return False, _Failure(reason=f"process {pid} ended without a word (killed?)", text="", error=None, is_consequence=False)


def _end_with_parent(parent: int) -> None:
    """Ask Linux to end this process when its parent ends."""
    try:
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)


def _num_native_threads() -> int | None:
    """Threads of this process as the operating system counts them, None where it does not tell."""
    try:
        return sum(1 for _ in Path("/proc/self/task").iterdir())
    except OSError:
        return None


def _refuse_unsafe_fork() -> None:
    native = _num_native_threads()
    if native is None or native <= threading.active_count():
        return
    if not _fork_is_safe(native):
        message = (
            "forked ranks would hang: this process has run a kernel on several threads before. "
            "Start ranks first, call torch.set_num_threads(1) before the first tensor operation, or set OMP_NUM_THREADS=1"
        )
        raise RuntimeError(message)


@cache
def _fork_is_safe(num_threads: int, patience_s: int = 10) -> bool:  # noqa: ARG001 - tried again when the number of threads has changed
    """Fork a child that does what a rank does first, and see whether it lives."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(patience_s)
        torch.set_num_threads(1)
        trial = torch.ones(256, 256, requires_grad=True)
        torch.autograd.backward((trial @ trial).exp().sum())
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0
