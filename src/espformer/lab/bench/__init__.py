"""The benchmark of ``espformer bench``: attentions are timed only if their results are correct.

- :mod:`espformer.lab.bench.cases`: what is measured: an operator, its backend, a mode, the sizes;
- :mod:`espformer.lab.bench.attentions`: ESP attention by backend, and its peers;
- :mod:`espformer.lab.bench.exact`: the float64 results that every row is checked against;
- :mod:`espformer.lab.clock`: medians of milliseconds, replayed graphs, peak memory;
- :mod:`espformer.lab.bench.measure`: one row after the other, within a budget of time;
- :mod:`espformer.lab.bench.suites`: the tables;
- :mod:`espformer.lab.bench.targets`: those with targets;
- :mod:`espformer.lab.bench.tables`: CSV, markdown and plot, with the conditions;
- :mod:`espformer.lab.bench.session`: all of it in one call, for the command and ``python -m``.

A row with too large an error gets no time.
"""
