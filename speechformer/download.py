"""Download a public corpus into the user cache: `python -m speechformer.download speeches` (or `ted`).

Every file is verified against the sha256 below before it takes its place. This command is the only part of the
project that uses the network.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from speechformer import console
from speechformer.corpora.files import cache_directory
from speechformer.errors import ArgumentParser, UserError


class Source(NamedTuple):
    """A public corpus: base URL, licence, folder in the cache, and the sha256 of each file."""

    url: str
    licence: str
    folder: str
    files: dict[str, str]


SPEECHES = {
    "test_CLS.tsv": "31277b7d67cff8ad717c9f43c05810c6b78feb67f04472bd7aa20e71eb2e0da8",
    "test_LM_hbush.txt": "a0592374b7cd47a6417a311892a4b8a59f35cbe054cbaf96c06e50e904c8451f",
    "test_LM_obama.txt": "6cb3bb657ae40cab1cb8f3f38f391dbdcc80a9b21b577d5fc1ea4ba86901bed2",
    "test_LM_wbush.txt": "1281773860075b12727f9f581940c028074d05f3efbf99bbfcc9c7c472d4dbd5",
    "train_CLS.tsv": "7dbd7cadc6efe746d0c0a7e5fe81f0ac2431bd2a3b86b51f4cb23f373466c88e",
    "train_LM.txt": "aff1d88fad90db8cedfe8918a9099ffdfe622641a2a8c6e25dac1f7eda199b1a",
}
TED = {
    "dev.en": "2fcfd5c3347c27ded1ffa67cf7d5bf075cdf0a77b84045f1fc363a794c2828af",
    "dev.fr": "3786dc3bccf0c84a4494e12d7ffdaab93b5c984b2632aa5ed04452b69e913b1e",
    "test.en": "47e1c66b3297abe55893c27104a4721b6d02a27883009a7985f87d3b84bec6de",
    "test.fr": "41a56c4aa86fa6b35c36b0aa234411edae514ca45bb355a583675a742621886f",
    "train.en": "69df29de80f462ba8d07b62f1c102675959d0e647520e4d55ffe99b9eb4be1a8",
    "train.fr": "a5065e385bee5d64307ba0e8187abc9a0e041223354c4ddac80752bec9511824",
}
GITHUB = "https://raw.githubusercontent.com"
SOURCES = {
    "speeches": Source(
        f"{GITHUB}/yasho191/ScratchLLM/85b6308efcbf4f6ce0481c0120d3f4eedeb9a73f/speechesdataset",
        "Speeches of presidents of the United States; packaged by github.com/yasho191/ScratchLLM under Apache-2.0.",
        "speeches",
        SPEECHES,
    ),
    "ted": Source(
        f"{GITHUB}/bhavberi/ANLP-Assignments/28f3616661c74045bec3c68d0d084552581c7499/A2/ted-talks-corpus",
        "TED talks are CC BY-NC-ND 4.0: name TED (ted.com), use them for nothing commercial, and pass on no altered "
        "copy; packaged by github.com/bhavberi/ANLP-Assignments.",
        "ted-en-fr",
        TED,
    ),
}


def download(url: str, files: dict[str, str], folder: Path) -> None:
    """Download files {name: sha256} from a base URL; valid files that exist are skipped, others are not overwritten.

    Raises:
        UserError: a file cannot be downloaded, its sha256 differs, or another file has its name.
    """
    import pooch

    for name, sha256 in files.items():
        path = folder / name
        if path.exists() and pooch.file_hash(path) != sha256:
            raise UserError(f"{path} is there already, but it is another file (its sha256 differs); remove it.")
        try:
            pooch.retrieve(f"{url.rstrip('/')}/{name}", sha256, name, folder, progressbar=True)
        except (OSError, ValueError) as error:  # of requests; of the sha256 and the URL
            raise UserError(
                f"{url}: {error}; check the network and the URL, or put the files into {folder} by hand."
            ) from None


def download_corpus(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    corpus = SOURCES[arguments.corpus]
    folder = arguments.to or cache_directory() / corpus.folder
    console.write(corpus.licence)
    download(arguments.source or corpus.url, corpus.files, folder)
    console.write(f"{len(corpus.files)} files in {folder}, every sha256 as expected.")


def main() -> None:
    """Run the command line."""
    about = "Download a public corpus into the user cache."
    parser = ArgumentParser(prog="python -m speechformer.download", description=about)
    parser.add_argument("corpus", choices=list(SOURCES))
    parser.add_argument("--to", type=Path, help="folder instead of the user cache; then set corpus.root=FOLDER")
    parser.add_argument("--source", help="another base URL of the same files")
    parser.run(download_corpus)


if __name__ == "__main__":
    main()
