"""The code blocks of the pages, as they stand there. (That of docs/your-own-algorithm.md is in test_register.)"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ai3_ops

torchvision = pytest.importorskip("torchvision")
ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "docs/swap.md").exists(), reason="the docs are not beside the tests")
MINE = """
#include <ai3/algorithm.h>
template <class T>
void conv2d_mine(const ai3::Conv2dProblem& p, const T* x, const T* w, const T* b, T* y, ai3::Workspace&) {
  for (int64_t i = 0; i < p.batch * p.in_height * p.in_width; i++)
    y[i] = ai3::narrowed<T>(ai3::fma1(ai3::widen(x[i]), ai3::widen(w[0]), b ? ai3::widen(b[0]) : ai3::Acc<T>(0)));
}
inline bool mine_supports(const ai3::Conv2dProblem& p, ai3::Reason& reason) {
  const bool one = p.in_channels <= 1 && p.out_channels == 1 && ai3::is_pointwise(p);
  return one || ai3::refuse(reason, "needs one weight");
}
AI3_ALGORITHM(conv2d, mine, .supports = mine_supports)
"""


def resnet18(**kwargs):
    """The same modules and names as the pages' network, half as many."""
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Runs the Python blocks of a page in a folder of their own, with the names given; all names after them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torchvision.models, "resnet18", resnet18)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.h").write_text(MINE)

    def run(name, **names):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
        assert blocks
        for number, text in enumerate(blocks):
            exec(compile(text, f"{name}, Python block {number + 1}", "exec"), names)
        return names

    return run


@pytest.mark.filterwarnings("ignore:ai3_ops.swap")
@pytest.mark.usefixtures("built_in_only")
def test_readme(page, monkeypatch):
    """All but what `optimize` measures: test_package has the first block as it stands."""
    tried = []
    optimize = ai3_ops.optimize
    monkeypatch.setattr(ai3_ops, "optimize", lambda model, x: optimize(model, x, "default", progress=False))
    monkeypatch.setattr(ai3_ops, "check", lambda *args: tried.append(args))  # test_register has what it does
    swap = ai3_ops.swap

    def quick(model, selectors="default", *args, **options):
        if selectors == "auto":  # tests/tuning/test_tune.py has what it measures
            tried.append(selectors)
            selectors = "default"
        return swap(model, selectors, *args, **options)

    monkeypatch.setattr(ai3_ops, "swap", quick)
    names = page("README.md")
    assert tried == ["auto", ("conv2d", "mine")]
    x, weight = torch.randn(1, 1, 3, 3), torch.full((1, 1, 1, 1), 2.0)
    assert torch.equal(torch.ops.ai3.conv2d_mine(x, weight), 2 * x)
    assert type(names["swapped"].conv1) is nn.Conv2d  # unswapped by the last line


@pytest.mark.filterwarnings("ignore:ai3_ops.swap")
def test_swap_page(page):
    model, x = resnet18().eval(), torch.randn(1, 3, 64, 64)
    names = page("docs/swap.md", ai3_ops=ai3_ops, torch=torch, model=model, x=x)
    assert type(names["fast"].conv1) is nn.Conv2d


def test_algorithms_page(page):
    page("docs/algorithms/README.md", ai3_ops=ai3_ops, torch=torch, F=nn.functional)
    x, w = torch.randn(1, 1, 3, 3), torch.randn(1, 1, 3, 3)
    with pytest.raises(RuntimeError) as error:
        torch.ops.ai3.conv2d_direct(x, w, padding="same")
    words = (
        "ai3::conv2d_direct() Expected a value of type 'List[int]' for argument 'padding' but instead found type 'str'"
    )
    assert words in str(error.value)
    assert words in (ROOT / "docs/algorithms/README.md").read_text()
    for algorithm in ("direct", "default"):
        swapped = ai3_ops.swap(nn.Conv2d(1, 2, 4, padding="same"), algorithm, x)
        torch.testing.assert_close(swapped(x), nn.functional.conv2d(x, swapped.weight, swapped.bias, padding="same"))


def test_a_name_under_a_module_reaches_its_other_calls_as_the_page_says():
    model = resnet18().eval()
    every = ai3_ops.explain(ai3_ops.swap(model, {"layer4": "direct"})).summary
    assert any(line.startswith("asked for: direct:") and "conv2d" in line and "relu" in line for line in every)
    alone = ai3_ops.explain(ai3_ops.swap(model, {r"re:layer4\..*conv\d": "direct"})).summary
    assert "asked for: direct: 2 conv2d" in alone


def test_longformer_page(page, monkeypatch):
    transformers = pytest.importorskip("transformers")
    real = transformers.LongformerConfig
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    monkeypatch.setattr(transformers, "LongformerConfig", lambda **options: real(**options, **sizes))
    names = page("docs/longformer.md")
    assert [layer.calls for layer in names["rows"]] == [1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_deploying_page(page, compiler):
    names = page("docs/deploying.md")
    model, swapped, x = names["model"], names["swapped"], names["x"]
    assert not ai3_ops.explain(swapped).filter(operation="conv2d", used="torch").layers
    with torch.inference_mode():
        torch.testing.assert_close(names["y"], model(x), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(names["again"](x), names["y"], rtol=1e-4, atol=1e-4)
        folded = names["folded"]
        torch.testing.assert_close(names["fast"](x), folded(x), rtol=1e-3, atol=1e-3)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
