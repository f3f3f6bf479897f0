"""Training: from the description of a run to its checkpoints and its results.

Read in this order: ``trainer`` (one run, from first to last), ``assemble`` (its data, model and
learner), ``learner`` (what every task shares, and classification), ``translation`` and
``finetuning`` (the other tasks), ``optimizers`` (where a learning rate is used), ``annealing``,
``checkpoints``, ``events`` and ``attention`` (around the steps), ``posttrain`` (evaluate, anneal,
harden), ``experiments`` and ``processes`` (many runs at once).

>>> from espformer.lab.recipes.recipe import load_recipe
>>> run = load_recipe("digits").run("espformer", overrides=["trainer.epochs=1"])
>>> run.trainer.epochs
1
"""
