"""Runs a function on several CPU ranks, each a forked process of one gloo group, and collects what it returns."""

from __future__ import annotations

import multiprocessing
import os
import queue as queues
import socket
import traceback
import warnings
from collections.abc import Callable
from typing import Any


def on_ranks(function: Callable[..., Any], *args: Any, ranks: int = 2, timeout: float = 120.0) -> list[Any]:
    """Calls ``function(rank, *args)`` on every rank; the results in the order of ranks.

    Forked, not spawned: an import of torch and Lightning costs seconds. Lightning takes the processes as torchrun's.
    """
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_child, args=(results, function, args, rank, ranks, port), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < ranks:
            rank, result, error = results.get(timeout=timeout)
            if error is not None:
                raise AssertionError(f"rank {rank} failed:\n{error}")
            found[rank] = result
    except queues.Empty:
        raise AssertionError(f"ranks {sorted(set(range(ranks)) - set(found))} did not finish in {timeout} s") from None
    finally:
        for process in processes:
            if len(found) == ranks:
                process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
    return [found[rank] for rank in range(ranks)]


def _child(results: Any, function: Callable[..., Any], args: Any, rank: int, ranks: int, port: int) -> None:
    os.environ.update(
        TORCHELASTIC_RUN_ID="test",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
    )
    warnings.filterwarnings("ignore", module=r"torch\.")  # what torch says of its own parts is not the test's matter
    try:
        result, error = function(rank, *args), None
    except BaseException:
        result, error = None, traceback.format_exc()
    results.put((rank, result, error))
    results.close()
    results.join_thread()
    # Not through the parent's exit handlers: they are the parent's.
    os._exit(0)
