"""Run the tests for a GPU without one: on an accelerator that is made of threads, `threads.cpp`.

    python benchmarks/offload_on_threads.py [--without SITE] [--build FOLDER] [arguments of pytest]

It is a device of its own to torch. So `AcceleratorDevice`, `torch.Stream`, `torch.Event`, pinned memory, autograd's
threads and the current stream in them are the real ones, and copies run at the same time as the computation: what is
not waited for gives wrong gradients here as it does on a GPU. With ``--without`` one wait or keep-alive of
`lightning_gacp.offload.device.Site` is left out. Whether that is missed depends on the time that things take: ARRIVED,
RELEASED_AT_BOUND and SOURCE_HELD are, SOURCE_WRITTEN never, since operations wait for their stream here. (The simulated
device of the other tests misses every one.)

Building it takes a C++ compiler, `ninja` and a minute. Convolutions are left out, since torch wants a kernel for them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import load

ROOT = Path(__file__).parents[1]
NAME = "threads"


def make_device(build: Path) -> None:
    """Build the device, and let torch know it."""
    torch.utils.rename_privateuse1_backend(NAME)
    module: Any = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 2  # as `DEVICES` in the source
    module.current_device = torch.accelerator.current_device_index
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()  # there is none but the host's
    module.set_rng_state = lambda state, device=None: None
    torch._register_device_module(NAME, module)
    load("threads", [str(ROOT / "benchmarks/threads.cpp")], build_directory=str(build), extra_cflags=["-O1"])


class Plugin:
    """Lets the tests that need a GPU run, with sizes that suit threads, and with a wait left out on demand."""

    def __init__(self, without: str | None) -> None:
        self.without = without

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """After collection, when all is imported."""
        for item in items:
            if hasattr(item.module, "WIDE"):
                item.module.WIDE, item.module.TOKENS = 512, 1024
        from lightning_gacp.offload.accelerator import AcceleratorDevice

        wait, hold = AcceleratorDevice.wait, AcceleratorDevice.hold

        def forgetful_wait(self: Any, stream: Any, event: Any, site: Any) -> None:
            if site.name != left_out:
                wait(self, stream, event, site)

        def forgetful_hold(self: Any, tensor: Any, site: Any) -> Any:
            return None if site.name == left_out else hold(self, tensor, site)

        left_out = self.without
        if left_out is not None:
            AcceleratorDevice.wait, AcceleratorDevice.hold = forgetful_wait, forgetful_hold  # type: ignore[method-assign]


def main() -> int:
    """Build and run; the exit status of pytest."""
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", help="a wait or keep-alive to leave out")
    parser.add_argument("--build", type=Path, help="folder for what is built, to be used again")
    arguments, for_pytest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        build = arguments.build or Path(temporary)
        build.mkdir(parents=True, exist_ok=True)
        make_device(build)
        torch.cuda.is_available = lambda: True  # what the tests are skipped by
        test = str(ROOT / "tests/offload/test_accelerator.py")
        options = ["-m", "cuda", "-k", "not convolution", "-q", "-p", "no:cacheprovider", *for_pytest]
        return int(pytest.main([test, *options], plugins=[Plugin(arguments.without)]))


if __name__ == "__main__":
    raise SystemExit(main())
