"""Kernels of one attention call, by time: ``python -m benchmarks.kernel_times esp-default``.

A case of ``espformer bench`` as torch's profiler sees it: every kernel with its launches and its
microseconds per call, forward and backward.
"""

from __future__ import annotations

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from espformer.lab.bench.attentions import find
from espformer.lab.bench.cases import MODES, Case
from espformer.lab.bench.measure import calling

CALLS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operator")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--mode", default=MODES[1], choices=MODES)
    parser.add_argument("--learnt", action="store_true", help="slices are parameters")
    for name, number in (("tokens", 197), ("heads", 512), ("width", 64)):
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--slices", type=int)
    parser.add_argument("--qk-width", type=int)
    case = Case(**vars(parser.parse_args()))
    device = torch.device("cuda")
    call = calling(find(case).make(case, device), case.inputs(device), case.backward)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    rows = [(event.self_device_time_total / CALLS, event) for event in found.key_averages()]
    print(case)
    for microseconds, event in sorted(rows, key=lambda row: -row[0]):
        if microseconds > 0:
            print(f"{microseconds:9.1f} us  {event.count / CALLS:5.1f} ×  {event.key[:90]}")
    print(f"{sum(row[0] for row in rows):9.1f} us in all")


if __name__ == "__main__":
    main()
