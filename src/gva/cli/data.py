"""`gva data`: text to token shards."""

import argparse
import os
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    data = commands.add_parser("data", help="text to token shards")
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")
    prepare = actions.add_parser("prepare", help="tokenize files or a dataset; without either, the standard library")
    prepare.add_argument(
        "inputs", nargs="*", type=Path, help="jsonl, txt, py or parquet files, plain or .gz .xz .zst, or folders"
    )
    prepare.add_argument("--out", type=Path, required=True, help="folder for the shards")
    prepare.add_argument("--dataset", help="a HuggingFace dataset, streamed: HuggingFaceFW/fineweb-edu, or a folder")
    prepare.add_argument("--dataset-config", help="its configuration, such as sample-100BT")
    prepare.add_argument("--dataset-split", default="train")
    prepare.add_argument("--max-documents", type=int, help="stop the stream after so many")
    prepare.add_argument("--valid", nargs="+", type=Path, help="validation files; else one document in 100 or more")
    prepare.add_argument("--tokenizer", type=Path, help="tokenizer.json or its folder; else a BPE trained on the data")
    prepare.add_argument("--vocab-size", type=int, help="of a BPE trained here (16384; 2048 for the standard library)")
    prepare.add_argument("--end", help="the token that ends a document")
    prepare.add_argument("--field", default="text", help="where the text is, in jsonl and parquet")
    prepare.add_argument(
        "--separator",
        metavar="TEXT",
        help=r"what stands between the documents of a .txt, \n for a line end; '' takes each file whole; by default "
        "blank lines end documents, of up to 16,384 characters",
    )
    prepare.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    prepare.set_defaults(run=_data_prepare)
    recall = actions.add_parser("recall", help="associative recall: a task that asks what a cache has kept")
    recall.add_argument("--out", type=Path, required=True, help="folder, which gva train and gva compare take")
    recall.add_argument("--keys", type=int, default=4096, help="how many there are to draw from")
    recall.add_argument("--values", type=int, default=4096)
    recall.add_argument("--pairs", type=int, default=64, help="trained at most; four times as many are tested")
    recall.add_argument("--every", type=int, default=50, help="steps between tests, which may double the pairs")
    recall.set_defaults(run=_data_recall)
    verify = actions.add_parser("verify", help="compare every file with what was written")
    verify.add_argument("folder", type=Path)
    verify.set_defaults(run=_data_verify)


def _data_prepare(arguments: argparse.Namespace) -> int:
    from gva.data import prepare
    from gva.errors import check

    for name in ("workers", "max_documents"):
        value = getattr(arguments, name)
        check(value is None or value > 0, f"--{name.replace('_', '-')}", value, "must be positive")
    shared = {name: getattr(arguments, name) for name in ("tokenizer", "end", "field")}
    if arguments.vocab_size is not None:
        shared["vocab_size"] = arguments.vocab_size
    if arguments.separator is not None:
        shared["separator"] = arguments.separator.replace("\\n", "\n").replace("\\t", "\t")
    if arguments.dataset and arguments.inputs:
        raise ValueError(f"give files or --dataset, not both ({arguments.inputs[0]} and {arguments.dataset})")
    if arguments.valid and not arguments.inputs:
        raise ValueError("--valid goes with input files; elsewhere documents are held out")
    if arguments.tokenizer and not arguments.inputs and not arguments.dataset:
        raise ValueError("--tokenizer: the standard library is tokenised with a BPE of its own; give input files")
    if arguments.dataset:
        shared |= {"config": arguments.dataset_config, "split": arguments.dataset_split}
        index = prepare.prepare_dataset(
            arguments.dataset, arguments.out, max_documents=arguments.max_documents, **shared
        )
    elif arguments.inputs:
        shared |= {"valid": _files(arguments.valid or [], arguments.out), "workers": arguments.workers}
        index = prepare.prepare_files(_files(arguments.inputs, arguments.out), arguments.out, **shared)
    else:
        index = prepare.prepare_standard_library(arguments.out, shared.get("vocab_size", 2048))
    counts = ", ".join(f"{tokens:,} {split} tokens" for split, tokens in index["tokens"].items())
    print(f"{arguments.out}: {counts}, vocabulary {index['vocab_size']:,}")
    return 0


def _files(places: list[Path], out: Path) -> list[Path]:
    from gva.data.documents import KINDS, DataError, files_in

    found = {place: files_in(place, but=out) for place in places}
    if empty := [place for place, files in found.items() if not files]:
        raise DataError(f"{empty[0]}: a folder without texts ({', '.join(KINDS)}); give another, or the files in it")
    return [file for files in found.values() for file in files]


def _data_recall(arguments: argparse.Namespace) -> int:
    from gva.data.recall import write_recall

    sizes = {name: getattr(arguments, name) for name in ("keys", "values", "pairs", "every")}
    index = write_recall(arguments.out, **sizes)
    row = f"length={3 * arguments.pairs} document_mask=true max_position_embeddings={12 * arguments.pairs}"
    print(f"{arguments.out}: vocabulary {index['vocab_size']:,}; train with {row}")
    return 0


def _data_verify(arguments: argparse.Namespace) -> int:
    from gva.data.source import verify

    verify(arguments.folder)
    print(f"{arguments.folder}: every file is as it was written")
    return 0
