"""A worker of figures.py: times layers of the original ai3 (pip `aithree`) in a process of its own, on one thread.

Reads requests from standard input, one JSON object each: {"algorithm", "layer": a line of a shape file} prepares a layer, "run"
times one call of it on a fresh copy of the input. Answers each with one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time

import ai3
import torch
from torch import nn


def main() -> None:
    """Serve until standard input ends."""
    torch.set_num_threads(1)
    model: nn.Module = nn.Identity()
    x = torch.empty(0)
    for line in sys.stdin:
        request = json.loads(line)
        if request == "run":
            copy = x.clone()
            with torch.inference_mode():
                start = time.perf_counter()
                model(copy)
            print(json.dumps(time.perf_counter() - start), flush=True)
            continue
        c, k, kernel, stride, pad = (request[name] for name in ("C", "K", "kernel", "stride", "pad"))
        x = torch.randn(request["N"], c, request["H"], request["W"])
        model = nn.Sequential(nn.Conv2d(c, k, kernel, stride, pad))  # a bare convolution it leaves alone
        expected = model(x)
        ai3.swap_conv2d(model, request["algorithm"], x.shape)
        error = (model(x) - expected).abs().max() / expected.abs().max()
        print(json.dumps(error.item()), flush=True)


if __name__ == "__main__":
    main()
