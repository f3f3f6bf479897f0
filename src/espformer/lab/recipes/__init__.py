"""Recipes: an experiment as a YAML file, and what reads one into typed runs."""
