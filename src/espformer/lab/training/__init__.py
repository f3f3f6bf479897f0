"""Recipes, runs and experiments; the Lightning modules behind them.

>>> from espformer.lab.training import load_recipe
>>> run = load_recipe("digits").run("espformer", overrides=["trainer.epochs=1"])
>>> run.trainer.epochs
1
"""

from espformer.lab.training.errors import ConfigError, RunError, UserError
from espformer.lab.training.recipe import Recipe, load_recipe, recipe_names
from espformer.lab.training.specs import build_mechanism

__all__ = [
    "ConfigError",
    "Recipe",
    "RunError",
    "UserError",
    "build_mechanism",
    "load_recipe",
    "recipe_names",
]
