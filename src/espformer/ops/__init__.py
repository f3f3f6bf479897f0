"""The operators: tensors in, tensors out. One folder each, and what they share."""
