"""Results: files that keep them, tables next to the paper's, claims and their tests."""
