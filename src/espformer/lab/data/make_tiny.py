"""Small made-up files in exactly the formats of the real data sets, to try things out without them.

    python -m espformer.lab.data.make_tiny DIR
    ESPFORMER_DATA=DIR ...

A class is easy to tell from another, so that even a tiny model learns something; nothing that is
measured on them means anything. Checksums are written beside the files.
"""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np

from espformer.lab.data.files import MANIFEST, require, sha256

Random = np.random.RandomState
Array = np.ndarray[Any, np.dtype[Any]]

SYLLABLES = ["ba", "den", "ki", "lor", "mu", "nas", "pe", "rit", "so", "tul", "ven", "zo"]
WORDS = [first + second for first in SYLLABLES for second in SYLLABLES]


def make_tiny(folder: str | Path) -> Path:
    """Write tiny versions of all data sets that come as files.

    Args:
        folder: to write to, as ``data_dir`` or ``ESPFORMER_DATA`` would name it.

    Returns:
        the folder.
    """
    folder = Path(folder)
    makers = {
        "mnist": _mnist,
        "cats_dogs": _cats_dogs,
        "imdb": _imdb,
        "tweeteval_sentiment": _tweeteval,
        "iwslt14_de_en": _iwslt14,
        "multi30k_de_en": _multi30k,
        "modelnet40": _modelnet40,
    }
    for name, make in makers.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        make(place, Random(0))
        files = sorted(path for path in place.iterdir() if path.name != MANIFEST)
        lines = [f"{sha256(path)}  {path.name}\n" for path in files]
        (place / MANIFEST).write_text("".join(lines), encoding="utf-8")
    return folder


def _labels(random: Random, count: int, classes: int) -> Array:
    return random.permutation(np.arange(count) % classes)


def _mnist(folder: Path, random: Random) -> None:
    arrays: dict[str, Array] = {}
    for split, count in (("train", 200), ("test", 100)):
        labels = _labels(random, count, 10).astype(np.uint8)
        images = random.randint(0, 60, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(int(label), 4)
            image[9 * row : 9 * row + 7, 7 * column : 7 * column + 7] += 180
        arrays |= {f"x_{split}": images, f"y_{split}": labels}
    np.savez_compressed(folder / "mnist.npz", allow_pickle=False, **arrays)


def _cats_dogs(folder: Path, random: Random) -> None:
    for file, count in (("train-00", 60), ("train-01", 60), ("test", 40)):
        labels = _labels(random, count, 2)
        rows = [_stripes(random, int(label)) for label in labels]
        columns = {
            "image": rows,
            "label": labels.astype(np.int8),
            "source": [f"{('Cat', 'Dog')[label]}/{i}.jpg" for i, label in enumerate(labels)],
        }
        _parquet(folder / f"{file}.parquet", columns)


def _stripes(random: Random, label: int) -> bytes:
    """Draw a JPEG of 224×224 with stripes that lie (cat) or stand (dog), in random colours."""
    image = require("PIL.Image")
    wave = np.sin(np.arange(224) / random.uniform(4, 9) + random.uniform(0, 6))
    colours = random.uniform(60, 120, 3)
    pixels = 128 + wave[:, None, None] * np.ones((1, 224, 1)) * colours
    if label:
        pixels = pixels.transpose(1, 0, 2)
    encoded = io.BytesIO()
    image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=72)
    return encoded.getvalue()


def _imdb(folder: Path, random: Random) -> None:
    for split, count in (("train", 100), ("test", 60)):
        labels = _labels(random, count, 2)
        texts = [_review(random, 2 * int(label), random.randint(10, 80)) for label in labels]
        columns = {
            "text": texts,
            "label": labels.astype(np.int8),
            "rating": np.where(labels, 9, 2).astype(np.int8),
            "id": np.arange(count, dtype=np.int32),
        }
        _parquet(folder / f"{split}.parquet", columns)


def _tweeteval(folder: Path, random: Random) -> None:
    for split, count in (("train", 150), ("validation", 30), ("test", 60)):
        labels = _labels(random, count, 3)
        texts = [f"@user {_review(random, int(label), 8)} \u2764" for label in labels]
        _parquet(folder / f"{split}.parquet", {"text": texts, "label": labels.astype(np.int8)})


def _review(random: Random, sentiment: int, words: int) -> str:
    """Draw words of all kinds, those of one sentiment (0, 1, 2) more often than chance."""
    own = WORDS[sentiment * 20 : sentiment * 20 + 20]
    chosen = [random.choice(own if random.rand() < 0.4 else WORDS[60:]) for _ in range(words)]
    text = " ".join(chosen).capitalize() + "."
    return text.replace(" ba", "<br /><br />ba", 1) if words > 10 else text


def _pairs(random: Random, count: int) -> dict[str, list[str]]:
    """Make sentences and translations, in which each word is the English one spelt backwards."""
    german, english = [], []
    for _ in range(count):
        words = random.choice(WORDS, random.randint(2, 16))
        english.append(" ".join(words) + " .")
        german.append(" ".join(word[::-1] for word in words) + " .")
    return {"de": german, "en": english}


def _iwslt14(folder: Path, random: Random) -> None:
    train = _pairs(random, 200)
    origins = ["iwslt14" if i % 4 else "iwslt17_train" for i in range(200)]
    _parquet(folder / "train_subset.parquet", {**train, "source": origins})
    for split, count in (("valid", 30), ("test", 40)):
        _parquet(folder / f"{split}.parquet", _pairs(random, count))


def _multi30k(folder: Path, random: Random) -> None:
    for split, count in (("train", 150), ("valid", 30), ("test2016", 30)):
        _parquet(folder / f"{split}.parquet", _pairs(random, count))


def _modelnet40(folder: Path, random: Random) -> None:
    names = np.array([f"kind_{i:02}" for i in range(40)])
    axes = Random(0).uniform(0.2, 1, (40, 3))
    for file, count in (("train_0", 80), ("train_1", 80), ("test", 80)):
        labels = _labels(random, count, 40)
        points = random.standard_normal((count, 1024, 3))
        points *= axes[labels][:, None] / np.linalg.norm(points, axis=-1, keepdims=True)
        points -= points.mean(1, keepdims=True)
        points /= np.linalg.norm(points, axis=-1).max(1)[:, None, None]
        np.savez_compressed(
            folder / f"{file}.npz",
            allow_pickle=False,
            points_i16=np.round(points * 2048).astype(np.int16),
            label=labels.astype(np.uint8),
            name=np.array([f"{names[label]}_{i:04}" for i, label in enumerate(labels)]),
            class_names=names,
        )


def _parquet(path: Path, columns: dict[str, Any]) -> None:
    table = require("pyarrow").table(columns)
    require("pyarrow.parquet").write_table(table, path, compression="zstd")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {__spec__.name if __spec__ else 'make_tiny'} DIR")
    print(make_tiny(sys.argv[1]))
