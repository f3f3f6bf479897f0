"""Training: from the description of a run to its checkpoints and its results.

>>> from espformer.lab.recipes.recipe import load_recipe
>>> run = load_recipe("digits").run("espformer", overrides=["trainer.epochs=1"])
>>> run.trainer.epochs
1
"""
