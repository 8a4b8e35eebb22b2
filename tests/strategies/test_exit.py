"""Process groups are closed when the interpreter goes."""

from __future__ import annotations

import atexit
import socket

import pytest
import torch.distributed as dist

from lightning_gacp.strategies.ranks import HostSum


def test_groups_are_closed_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered once, however many fits there were; and what is registered closes the group, or finds none."""
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", lambda f: registered.remove(f) if f in registered else None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        assert [HostSum()([1.5, 2.0]), HostSum()([3.0])] == [[1.5, 2.0], [3.0]]
        assert len(registered) == 1
        registered[0]()  # type: ignore[operator]
        assert not dist.is_initialized()
        registered[0]()  # type: ignore[operator]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
