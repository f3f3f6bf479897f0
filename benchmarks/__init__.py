"""Benchmarks that print one table and refuse to call a wrong result fast.

- :mod:`espformer.lab.bench`: what ``espformer bench`` and ``make bench-gpu`` run, in the package;
- :mod:`benchmarks.measure`: clocks and the table of the CPU;
- :mod:`benchmarks.memory`: peak memory of one call, in a process of its own;
- :mod:`benchmarks.cpu`: what ``make bench`` runs;
- :mod:`benchmarks.sorting`: differentiable sorts, ours and those of other libraries.

Every row names its setting and carries the error of the very result that was timed. Its verdict is
FAILED when that error is too large, whatever the time was. Results go to ``benchmarks/results/``
with the command, the machine, the versions, the seeds and the date.
"""
