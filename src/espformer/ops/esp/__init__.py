"""Expected Sliced Transport Plans: Algorithm 1, the linear-time operator, and its GPU kernels."""
