"""A saved network that several processes and threads run at once (docs/serving.md)."""

import importlib.util
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import ai3_ops

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "serving.py"


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.Flatten(1)
    ).eval()
    path = tmp_path / "model.ai3"
    ai3_ops.save(ai3_ops.optimize(model, torch.randn(1, 3, 32, 32), "default", progress=False), path)
    return path


def test_forked_processes_answer_as_one_does(saved):
    """In a process of its own: this one has run with threads, which a fork would lose."""
    code = (
        "import importlib.util, sys, torch, ai3_ops\n"
        f"spec = importlib.util.spec_from_file_location('serving', {str(EXAMPLE)!r})\n"
        "serving = importlib.util.module_from_spec(spec)\n"
        "sys.modules['serving'] = serving\n"
        "spec.loader.exec_module(serving)\n"
        f"rate, answers = serving.serve({str(saved)!r}, [1, 3, 32, 32], 16)\n"
        "assert rate > 0 and len(answers) == 16\n"
        "for i, ours in enumerate(answers):\n"
        "    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(i))\n"
        "    assert torch.equal(ours, serving.model(x))\n"
        "mapped = [line for line in open('/proc/self/maps') if 'model.ai3' in line]\n"
        "assert mapped and all(line.split()[1][3] == 'p' for line in mapped)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_processes_share_the_weights(saved):
    """Their pages are the file's: none was copied when it was read, or written to."""
    loaded, x = ai3_ops.load(saved), torch.randn(1, 3, 32, 32)
    loaded(x)
    copied, inside = 0, False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef" and "-" in line.split()[0]:
            inside = "model.ai3" in line
        elif inside and line.startswith("Anonymous:"):
            copied += int(line.split()[1])
    assert copied == 0


@pytest.mark.parametrize("callers", [2, 4])
def test_callers_of_one_module_do_not_disturb_each_other(saved, callers):
    loaded = ai3_ops.load(saved)
    inputs = [torch.randn(n, 3, 32, 32) for n in (1, 2, 1, 3, 1, 1, 2, 1) * 8]
    expected = [loaded(x) for x in inputs]
    torch.set_num_threads(1)

    def run(x):
        with torch.inference_mode():
            return loaded(x)

    with ThreadPoolExecutor(callers) as pool:
        for ours, theirs in zip(pool.map(run, inputs), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_example_is_documented():
    assert importlib.util.spec_from_file_location("serving", EXAMPLE) is not None
    assert "examples/serving.py" in (EXAMPLE.parents[1] / "docs" / "serving.md").read_text()
