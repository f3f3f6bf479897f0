"""Training a translator: label-smoothed cross-entropy per token, BLEU by beam search.

A search takes many times as long as a loss: most validations measure the loss alone.
"""

from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from espformer.lab.data import Task
from espformer.lab.recipes.schema import TrainingRun
from espformer.lab.training.batches import SeededBatches
from espformer.lab.training.learner import Learner, at_least_float32

DECODE_EVERY = 5
"""Epochs between validations that search for translations, unless a run says another number."""


def corpus_bleu(hypotheses: list[str], references: list[str], tokenize: str = "13a") -> float:
    """BLEU of a corpus, by sacrebleu.

    Args:
        hypotheses: translations.
        references: what they are compared with, one for each.
        tokenize: how sacrebleu finds the words: "13a" for plain texts, its standard; "none" for
            texts that are tokenised already, where spaces alone separate words, as fairseq does.

    Example:
        >>> corpus_bleu(["a cat sat on the mat ."], ["a cat sat on the mat ."])  # doctest: +SKIP
        100.0
    """
    import sacrebleu

    # force: sacrebleu would warn that tokenised texts should be given as plain ones.
    bleu = sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenize, force=True)
    return float(bleu.score)


class Translator(Learner):
    """Batches are mappings with ``source`` and ``target`` and their masks; targets go bos to eos.

    Args:
        run: the run.
        model: ``model(source, target, source_mask)`` gives logits of the next tokens, and
            ``model.translate`` translations.
        task: its data, for the vocabulary and the texts that translations are compared with.
    """

    score = "bleu"

    def __init__(self, run: TrainingRun, model: nn.Module, task: Task) -> None:
        super().__init__(run, model)
        self.task = task
        self._hypotheses: list[str] = []
        self._searches = True

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, tokens = self.measure("train", batch)
        self.log_loss(loss)
        return self.weighted(loss, tokens)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.measure("valid", batch)
        if self._searches:
            self._translate(batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.measure("test", batch)
        self._translate(batch)

    def on_validation_epoch_start(self) -> None:
        self._hypotheses = []
        done, every = self.current_epoch + 1, self.run.decode_every or DECODE_EVERY
        last = self.trainer.max_epochs
        # The last validation of a training, which may be some epochs before its end.
        follows = done + (self.trainer.check_val_every_n_epoch or 1)
        self._searches = done % every == 0 or last is None or follows > last

    def on_test_epoch_start(self) -> None:
        self._hypotheses = []

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if self._searches:
            split = self.task.test if self.task.valid is None else self.task.valid
            self._log_bleu("valid", split, self.trainer.val_dataloaders)

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        self._log_bleu("test", self.task.test, self.trainer.test_dataloaders)

    def measure(self, stage: str, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Mean loss over the tokens to predict, and their number."""
        given, wanted = batch["target"][:, :-1], batch["target"][:, 1:]
        present = batch["target_mask"][:, 1:]
        logits = self.model(batch["source"], given, source_mask=batch["source_mask"])
        loss = F.cross_entropy(
            at_least_float32(logits.flatten(0, 1)),
            wanted.masked_fill(~present, -100).flatten(),
            label_smoothing=self.run.label_smoothing if stage == "train" else 0.0,
        )
        tokens = present.sum()
        self.means_of[stage].add(loss, tokens)
        return loss, tokens

    def _translate(self, batch: dict[str, Tensor]) -> None:
        model: Any = self.model
        tokens = model.translate(batch["source"], batch["source_mask"], beam=self.run.beam)
        vocabulary: Any = self.task.vocabulary
        self._hypotheses += [vocabulary.decode(row) for row in tokens.tolist()]

    def _log_bleu(self, stage: str, split: Any, loader: Any) -> None:
        sampler: SeededBatches = loader.batch_sampler
        order = [index for batch in sampler for index in batch][: len(self._hypotheses)]
        pairs = dict(zip(order, self._hypotheses, strict=True))
        if self.trainer.world_size > 1:
            gathered: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(gathered, pairs)
            pairs = {index: text for part in gathered for index, text in part.items()}
        texts = split.target_texts
        tokenize = self.task.info.get("bleu_tokenize", "13a")
        bleu = corpus_bleu(list(pairs.values()), [texts[index] for index in pairs], tokenize)
        self.log(f"{stage}/bleu", bleu, prog_bar=True)
