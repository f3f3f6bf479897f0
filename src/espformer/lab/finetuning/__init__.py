"""Pre-trained encoders of transformers with another attention: scored at once, then fine-tuned.

What `espformer finetune` does for each attention and each seed:

1. A linear head is fitted on the mean of the encoder's last hidden states, once, with the original
   attention and the published weights. All attentions begin with this head.
2. *Plug and play*: the attention is replaced, nothing else, and the model is scored.
3. The whole model is fine-tuned, for the same number of steps with the same batches whatever the
   attention; the sort temperature of ESP falls geometrically on the way.
4. It is scored as it was trained and, for ESP, with an exact sort.

Why a fitted head: with a random one the score before training says nothing about the attention. A
head that is trained together with the encoder would give softmax more training than the others.
A logistic regression is convex: it has one solution, no seed, and leaves the encoder alone.
"""

from espformer.lab.finetuning.config import FinetuneRun
from espformer.lab.finetuning.model import PooledClassifier, load_classifier

__all__ = ["FinetuneRun", "PooledClassifier", "load_classifier"]
