"""Shared by all operators: masks, rules of autograd, registration with torch."""
