"""Settings of every test."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys

import pytest
import torch
from forks import Forks

from ai3_ops import registry

# Read when Inductor is imported. One level for all, which then share one precompiled header; how fast the code is that calls
# kernels, nothing here measures.
os.environ["AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"] = "O0"


@pytest.fixture(autouse=True)
def _fixed_state():
    """The same random numbers in every test, one thread (tests run side by side), the process's switches as they were."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def built_in_only(monkeypatch):
    """Without the algorithms that tests before this one registered, some of which fail or are slow on purpose."""
    of_text = registry._of_text
    built_in = sys.modules["ai3_ops.registering.register"]._BUILT_IN
    before = {(a.operation, a.name) for a in registry.registered()} - built_in

    def known(text):
        return [a for a in of_text(text) if (a.operation, a.name) not in before]

    monkeypatch.setattr(registry, "_of_text", known)
    monkeypatch.setattr(registry, "_python", {})


@pytest.fixture(scope="session")
def shared_tmp(tmp_path_factory):
    """A directory of this run, one for all processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def once(shared_tmp):
    """Makes a file that all processes of a run share: the first that asks for it makes it, the others wait."""

    def made(name, make):
        path = shared_tmp / name
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                make(path)
        return path

    return made


@pytest.fixture(autouse=True, scope="session")
def _compiler_caches(shared_tmp):
    """What inductor compiles, it compiles in this process and keeps for this run only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared_tmp / "inductor"))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def fork():
    """Runs a program in a process of its own: `forks.Forks.run`."""
    forks = Forks()
    yield forks.run
    forks.close()


@pytest.fixture(scope="session")
def compiler():
    """A C++ compiler, for what is tested with inductor."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    return found or pytest.skip("needs a C++ compiler: install g++ or name one in CXX")
