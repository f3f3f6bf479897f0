"""Results: files that keep them, tables beside the paper's, claims and their tests."""
