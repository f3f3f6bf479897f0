"""The laboratory: training, benchmarks and reports. The library never imports it."""
