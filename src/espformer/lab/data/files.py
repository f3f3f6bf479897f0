"""The one way to find the files of a data set, and to be sure that they are whole.

Looked for in this order: the folder given as ``data_dir``; the folder that the environment variable
``ESPFORMER_DATA`` names; the Hugging Face hub, for sets that are public there. A folder given by
hand that lacks the set is an error, not a reason to look elsewhere.

Checksums: a file ``SHA256SUMS`` beside the data (as ``sha256sum * > SHA256SUMS`` writes it) is
believed first, then the sums that this package knows.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espformer.lab.errors import first_line
from espformer.ops.common.optional import how_to_install

ENVIRONMENT = "ESPFORMER_DATA"
MANIFEST = "SHA256SUMS"
# The hub keeps a copy of every public set as parquet under this name, as config/split/0000.parquet.
HUB_REVISION = "refs/convert/parquet"

PathLike = str | os.PathLike[str]


class DataError(ValueError):
    """Files of a data set are damaged, or not what they should be."""


class DataMissing(DataError, FileNotFoundError):
    """Files of a data set were not found."""


@dataclass(frozen=True)
class Hub:
    """A data set on the hub: its repository, configuration, and names of our splits."""

    repository: str
    config: str
    splits: Mapping[str, str]


@dataclass(frozen=True)
class Source:
    """The files of a data set: names, layout, checksums, and where to get them.

    Args:
        name: of the data set, as in ``load(name)``.
        folder: its folder inside the data directory.
        splits: for each split the ways its files may be named; each way is a tuple of patterns
            that must all match.
        layout: file name → what is in it, for the error message.
        where: where to get the data, a sentence.
        licence: its terms, a sentence.
        rows: published number of examples of each split.
        sums: file name → known versions, as (bytes, sha256).
        notes: what differs from the published set in the files that ``sums`` knows.
        hub: its place on the hub, if any.
    """

    name: str
    folder: str
    splits: Mapping[str, Sequence[Sequence[str]]]
    layout: Mapping[str, str]
    where: str
    licence: str
    rows: Mapping[str, int] = field(default_factory=dict)
    sums: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    hub: Hub | None = None

    def tree(self) -> str:
        """Return the folder tree that is looked for, a line for each file."""
        width = max(map(len, self.layout))
        lines = [f"    {file:<{width}}  {content}" for file, content in self.layout.items()]
        return "\n".join(["DIR/", f"  {self.folder}/", *lines])


@dataclass(frozen=True)
class Files:
    """Files that were found: paths of each split, and the sha256 of each file."""

    source: Source
    place: str
    splits: Mapping[str, tuple[Path, ...]]
    sums: Mapping[Path, str]
    checked: str
    """Against what the checksums were compared: "known", "SHA256SUMS" or "nothing"."""

    def content(self, split: str) -> list[str]:
        """Checksums of a split: the key for whatever is derived from it."""
        return [self.sums[path] for path in self.splits[split]]

    def info(self, sizes: Mapping[str, int], found: Mapping[str, int]) -> dict[str, Any]:
        """Describe where the data came from, for ``Task.info``.

        Args:
            sizes: examples of each split of the task.
            found: examples of each split before any were held out or left out on request.
        """
        differences = [
            f"{split}: {count:,} examples, the published set has {self.source.rows[split]:,}"
            for split, count in found.items()
            if count != self.source.rows.get(split, count)
        ]
        if self.checked == "known":
            differences.extend(self.source.notes)
        return {
            "source": self.place,
            "sizes": dict(sizes),
            "sha256": {
                f"{path.parent.name}/{path.name}": digest for path, digest in self.sums.items()
            },
            "checked_against": self.checked,
            "licence": self.source.licence,
            "differences": differences,
        }


def source_of(name: str) -> Source:
    """Return the source of a data set, as `sources.yaml` describes it."""
    import yaml

    path = Path(__file__).with_name("sources.yaml")
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))[name]
    hub = raw.pop("hub", None)
    return Source(name, hub=None if hub is None else Hub(**hub), **raw)


def require(module: str) -> Any:
    """Import an optional package, or say how to install it.

    Example:
        >>> require("json").dumps([1])
        '[1]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ImportError(f"espformer.lab.data needs {how_to_install(package, 'train')}") from error


def sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find(source: Source, data_dir: PathLike | None = None) -> Files:
    """Find and check the files of a data set, or say where to get them and how to lay them out.

    Raises:
        DataMissing: nowhere found, or only in part.
        DataError: a checksum is wrong.
    """
    tried = []
    by_hand = data_dir is not None
    variable = os.environ.get(ENVIRONMENT)
    root = data_dir if by_hand else variable
    if root:
        described = "data_dir" if by_hand else ENVIRONMENT
        holder = Path(root).expanduser()
        # By hand, the folder of the set itself is as good as the folder that holds it.
        for folder in (holder / source.folder, holder)[: 1 + by_hand]:
            splits, missing = _match(source, folder)
            if not missing:
                return _checked(source, folder, splits)
            if folder.name == source.folder and folder.is_dir():
                tried.append(f"{folder} ({described}) lacks {', '.join(missing)}")
                raise DataMissing(_advice(source, tried))
        tried.append(f"no folder {source.folder} in {root} ({described})")
    elif not by_hand:
        tried.append(f"the environment variable {ENVIRONMENT} is not set")
    if by_hand or source.hub is None:
        raise DataMissing(_advice(source, tried))
    try:
        return _from_hub(source, source.hub)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        tried.append(f"hub, {source.hub.repository}: {first_line(error)}")
        raise DataMissing(_advice(source, tried)) from error


def _match(source: Source, folder: Path) -> tuple[dict[str, tuple[Path, ...]], list[str]]:
    splits, missing = {}, []
    for split, ways in source.splits.items():
        for patterns in ways:
            matches = [sorted(folder.glob(pattern)) for pattern in patterns]
            if all(matches):
                splits[split] = tuple(path for paths in matches for path in paths)
                break
        else:
            missing.append(" or ".join(" + ".join(patterns) for patterns in ways))
    return splits, list(dict.fromkeys(missing))


def _from_hub(source: Source, hub: Hub) -> Files:
    download = require("huggingface_hub").snapshot_download
    patterns = {split: f"{hub.config}/{theirs}/*.parquet" for split, theirs in hub.splits.items()}
    folder = Path(
        download(
            repo_id=hub.repository,
            repo_type="dataset",
            revision=HUB_REVISION,
            allow_patterns=sorted(set(patterns.values())),
        )
    )
    splits = {split: tuple(sorted(folder.glob(pattern))) for split, pattern in patterns.items()}
    empty = [patterns[split] for split, paths in splits.items() if not paths]
    if empty:
        raise DataError(f"no file {', '.join(empty)} in the revision {HUB_REVISION}")
    paths = {path for paths in splits.values() for path in paths}
    sums = {path: sha256(path) for path in sorted(paths)}
    return Files(source, f"hub: {hub.repository}, {hub.config}", splits, sums, "nothing")


def _checked(source: Source, folder: Path, splits: dict[str, tuple[Path, ...]]) -> Files:
    manifest = _read_manifest(folder / MANIFEST)
    sums, against = {}, set()
    for path in dict.fromkeys(path for paths in splits.values() for path in paths):
        size = path.stat().st_size
        if size == 0:
            raise DataError(_damaged(path, "is empty", folder))
        sums[path] = sha256(path)
        if path.name in manifest:
            against.add(MANIFEST)
            expected, sizes = {manifest[path.name]}, set()
        elif path.name in source.sums:
            against.add("known")
            expected = {digest for _, digest in source.sums[path.name]}
            sizes = {known for known, _ in source.sums[path.name]}
        else:
            against.add("nothing")
            continue
        if sums[path] not in expected:
            what = f"has sha256 {sums[path]}, expected {' or '.join(sorted(expected))}"
            if sizes and size < min(sizes):
                what = f"is cut short: {size:,} bytes of {min(sizes):,}; it " + what
            raise DataError(_damaged(path, what, folder))
    # Said of the whole set, so the weakest check among its files.
    for checked in ("nothing", MANIFEST, "known"):
        if checked in against:
            break
    return Files(source, str(folder), splits, sums, checked)


def _read_manifest(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    sums = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition(" ")
        if name:
            sums[name.lstrip(" *")] = digest.lower()
    return sums


def _damaged(path: Path, what: str, folder: Path) -> str:
    return (
        f"{path} {what}. The file is damaged or another version of the data: fetch it again. "
        f"If it is the version you want, state so: cd {folder} && sha256sum * > {MANIFEST}"
    )


def _advice(source: Source, tried: list[str]) -> str:
    return "\n".join(
        [
            f"The data set {source.name} was not found:",
            *(f"  - {place}" for place in tried),
            f"Get it: {source.where}",
            f"Lay it out like this, and pass data_dir=DIR or set {ENVIRONMENT}=DIR (commands: "
            "data.directory=DIR for train and reproduce, --data-dir DIR for others):",
            source.tree(),
        ]
    )
