"""The laboratory: what trains, measures and reports. The library never imports it."""
