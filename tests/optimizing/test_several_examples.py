"""`optimize` with a list of example inputs: each has its plan, packs are shared."""

import warnings

import pytest
import torch
from torch import nn

import ai3_ops
from ai3_ops.optimizing.planned import PLANS
from ai3_ops.programs.lower import Region


class Pairs(nn.Module):
    """Its views hold the length as a number."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        n = int(x.shape[1])  # a number: a graph is for one length
        y = self.first(x).view(-1, n // 2, 2, 64).transpose(1, 2).reshape(x.shape[0], n, 64)
        return self.second(torch.relu(y))


def pooled():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 5)
    ).eval()


def constants(module):
    plans = {id(p): p for p in module._ai3_plans.values()}.values()
    regions = [m for p in plans for m in p.body.modules() if isinstance(m, Region)]
    return [c.data_ptr() for region in regions for c in region.program.constants]


def holds(model, fast, inputs):
    for x in inputs:
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", [True, False])
def test_each_has_a_plan_and_packs_are_shared(keep, tmp_path):
    model, inputs = Pairs().eval(), [torch.randn(1, 16, 64), torch.randn(1, 32, 64), (torch.randn(2, 8, 64),)]
    tensors = [x[0] if isinstance(x, tuple) else x for x in inputs]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)
        fast = ai3_ops.optimize(model, inputs, "default", keep_original=keep, progress=False)
        assert len(fast._ai3_plans) == 3
        assert len({id(plan) for plan in fast._ai3_plans.values()}) == 3
        assert len(set(constants(fast))) == 1
        holds(model, fast, tensors)
        holds(model, fast, [torch.randn(5, 32, 64)])  # another batch
        ai3_ops.save(fast, tmp_path / "model.ai3")
        loaded = ai3_ops.load(tmp_path / "model.ai3")
        for x in tensors:
            assert torch.equal(loaded(x), fast(x))
    assert len(set(constants(loaded))) == 1


def test_more_than_a_module_keeps_by_itself():
    model, inputs = Pairs().eval(), [torch.randn(1, 2 * n, 64) for n in range(1, PLANS + 3)]
    fast = ai3_ops.optimize(model, inputs, "default", progress=False)
    assert len(fast._ai3_plans) == len(inputs)
    with torch.no_grad():
        holds(model, fast, inputs)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(16, 32)

    def forward(self, x, y, scale=1.0):
        return torch.relu(self.first(x)) * self.second(y) * scale


def test_a_batch_beside_one_item():
    model, (x, y) = Gated().eval(), torch.randn(2, 4, 16)
    fast = ai3_ops.optimize(model, [(x, y), (x, y[:1])], "default", keep_original=False, progress=False)
    assert not fast._ai3_original
    with torch.no_grad():
        for given in ((x, y), (x, y[:1])):
            torch.testing.assert_close(fast(*given), model(*given))


def test_files_keep_the_plans_of_all_examples(tmp_path):
    model, x = Gated().eval(), torch.randn(2, 8, 16)
    fast = ai3_ops.optimize(model, [(x, x, float(n)) for n in range(1, PLANS + 3)], "default", progress=False)
    with torch.no_grad():
        for length in range(9, 14):  # of the first one
            fast(*torch.randn(2, 2, length, 16), 1.0)
        ai3_ops.save(fast, tmp_path / "model.ai3")
        loaded = ai3_ops.load(tmp_path / "model.ai3")
        for length, scale in ((8, 2.0), (14, 1.0), (8, 2.0), (8, 5.0), (15, 3.0), (8, 6.0), (8, 1.0)):
            given = *torch.randn(2, 2, length, 16), scale
            torch.testing.assert_close(loaded(*given), model(*given))


def test_sizes_that_the_same_programs_compute():
    model, inputs = pooled(), [torch.randn(1, 3, 16, 16), torch.randn(1, 3, 33, 20), torch.randn(8, 3, 64, 64)]
    fast = ai3_ops.optimize(model, inputs, "default", progress=False)
    assert len({id(plan) for plan in fast._ai3_plans.values()}) == 1
    with torch.no_grad():
        holds(model, fast, inputs)


def test_dicts_and_parts_of_a_model():
    class Counts(nn.Module):
        """Its calls change a list, so that it is captured in parts."""

        def __init__(self):
            super().__init__()
            self.body, self.seen = Pairs(), []

        def forward(self, x, scale=1.0):
            self.seen.append(x.shape)
            return self.body(x) * scale

    model, inputs = Counts().eval(), [{"x": torch.randn(1, 16, 64), "scale": 2.0}, {"x": torch.randn(1, 32, 64)}]
    with pytest.warns(UserWarning, match="a call changes"):
        fast = ai3_ops.optimize(model, inputs, "default", progress=False)
    with torch.no_grad():
        for given in inputs:
            torch.testing.assert_close(fast(**given), model(**given), rtol=1e-4, atol=1e-5)


def test_a_list_that_is_the_models_argument():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Pairs()

        def forward(self, images):
            return [self.body(x) for x in images]

    model, inputs = Takes().eval(), [torch.randn(1, 16, 64), torch.randn(1, 8, 64)]
    fast = ai3_ops.optimize(model, inputs, "default", progress=False)
    with torch.no_grad():
        for ours, theirs in zip(fast(inputs), model(inputs), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_one_that_the_model_cannot_compute():
    with pytest.raises(RuntimeError, match=r"running the model on the example inputs .* failed"):
        ai3_ops.optimize(Pairs().eval(), [torch.randn(1, 16, 64), torch.randn(1, 16, 63)], "default", progress=False)
