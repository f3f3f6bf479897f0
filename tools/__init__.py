"""Scripts that keep the documentation true."""
