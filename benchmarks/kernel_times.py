"""Kernels of one attention call, by time: ``python -m benchmarks.kernel_times esp-default``.

A case of ``espformer bench`` as torch's profiler sees it: every kernel with its launches and its
microseconds per call, forward and backward.
"""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.arguments import find_device, make_parser
from espformer.lab.bench.attentions import OPERATORS, find
from espformer.lab.bench.cases import MODES, Case
from espformer.lab.bench.measure import calling

CALLS = 10


def main() -> None:
    parser = make_parser("kernel_times", __doc__)
    parser.add_argument("operator", help="an attention of `espformer bench`")
    parser.add_argument("--backend", default="triton", help="who computes it")
    parser.add_argument("--mode", default=MODES[1], choices=MODES, help="passes of a call")
    parser.add_argument("--learnt", action="store_true", help="slices are parameters")
    parser.add_argument("--tokens", type=int, default=197, help="of a sequence")
    parser.add_argument("--heads", type=int, default=512, help="of all sequences of the batch")
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--slices", type=int, help="of a head, where not as the attention has them")
    parser.add_argument(
        "--qk-width", type=int, help="of queries and keys, where not that of a head"
    )
    options = parser.parse_args()
    if (options.operator, options.backend) not in OPERATORS:
        known = ", ".join(" --backend ".join(pair) for pair in OPERATORS)
        parser.error(f"no {options.operator} with --backend {options.backend}; there are: {known}")
    case, device = Case(**vars(options)), find_device(parser, "cuda")
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
