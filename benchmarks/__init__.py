"""Benchmarks. Each prints one table, in which rows with wrong results fail.

- :mod:`espformer.lab.bench`: ``espformer bench`` and ``make bench-gpu``, part of the package;
- :mod:`benchmarks.measure`: timers and tables for the CPU;
- :mod:`benchmarks.memory`: peak memory of one call, in a separate process;
- :mod:`benchmarks.cpu`: ``make bench``;
- :mod:`benchmarks.sorting`: differentiable sorts, ours and those of other libraries;
- :mod:`benchmarks.vit_step`, :mod:`benchmarks.packed_step`: training steps of whole models;
- :mod:`benchmarks.kernel_times`: the kernels of one call, by time;
- :mod:`benchmarks.calibration`, :mod:`benchmarks.onnx`: converted and exported models.

Every row gives its setting and the error of the result that was timed. It is FAILED if that error
is too large, whatever the time. Results go to ``benchmarks/results/`` with the command, the
machine, the versions, the seeds and the date.
"""
