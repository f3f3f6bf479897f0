"""The names of rows for readers: recipes, commands and files of results have labels instead."""

NAMES = {
    "transformer": "softmax",
    "transformer-low-rate": "softmax at the lower rate",
    "uniform": "uniform",
    "uniform-high-rate": "uniform at the higher rate",
    "difftransformer": "differential",
    "sinkformer": "Sinkhorn",
    "diff-sinkformer": "differential Sinkhorn",
    "espformer": "ESP",
    "espformer-paper": "ESP, paper's t",
    "espformer-default": "default ESP",
    "espformer-few": "ESP, 8 slices",
    "espformer-default-high-rate": "default ESP at the higher rate",
    "espformer-learnt": "ESP, learnt t",
    "espformer-balanced": "balanced ESP",
    "espformer-soft": "softer ESP",
    "espformer-absolute": "absolute ESP",
    "espformer-quantile": "quantile ESP",
    "espformer-class": "ESP with a softmax class token",
    "espformer-hard": "hard ESP",
    "diff-espformer": "differential ESP",
}
"""The name of each label that several recipes share. Other labels are names already."""
