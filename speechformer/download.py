"""Download a public corpus into the user cache: `python -m speechformer.download speeches` (or `ted`).

Every file is verified against the sha256 below before it is written. This command is the only part of the project
that uses the network.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from speechformer import console
from speechformer.corpora.files import atomic_write, cache_directory, read_file
from speechformer.errors import ArgumentParser, UserError


@dataclass(frozen=True)
class Source:
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
LARGEST = 2**26  # bytes of a file
GITHUB = "https://raw.githubusercontent.com"
SOURCES = {
    "speeches": Source(
        f"{GITHUB}/yasho191/ScratchLLM/85b6308efcbf4f6ce0481c0120d3f4eedeb9a73f/speechesdataset/",
        "Speeches of presidents of the United States; packaged by github.com/yasho191/ScratchLLM under Apache-2.0.",
        "speeches",
        SPEECHES,
    ),
    "ted": Source(
        f"{GITHUB}/bhavberi/ANLP-Assignments/28f3616661c74045bec3c68d0d084552581c7499/A2/ted-talks-corpus/",
        "TED talks are CC BY-NC-ND 4.0: name TED (ted.com), use them for nothing commercial, and pass on no altered "
        "copy; packaged by github.com/bhavberi/ANLP-Assignments.",
        "ted-en-fr",
        TED,
    ),
}


def download(source: str, files: dict[str, str], folder: Path, seconds: float = 600) -> None:
    """Download files {name: sha256} from a base URL with a final slash; valid files that exist are skipped.

    A file is written when all of it is there and valid. Nothing is overwritten.

    Args:
        seconds: time limit for each file.

    Raises:
        UserError: the server does not answer in time, the sha256 of a file differs, or another file has its name.
    """
    if not source.startswith(("http://", "https://")):
        raise UserError(f"--source must be a URL that begins with http:// or https://, not {source}.")
    for name, expected in files.items():
        path = folder / name
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(f"{name!r} is no file name; a download must stay in its folder.")
        if os.path.lexists(path):
            if hashlib.sha256(read_file(path)).hexdigest() != expected:
                raise UserError(f"{path} is there already, but it is another file (its sha256 differs); remove it.")
            continue
        content = fetch(source + name, folder, seconds)
        if hashlib.sha256(content).hexdigest() != expected:
            raise UserError(
                f"{source}{name} is not the expected file (its sha256 differs), so it is not written; the source may "
                "have changed, or a proxy altered it."
            )
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(content)


def fetch(url: str, folder: Path, seconds: float) -> bytes:
    """Return the content at a URL; see `download`. `folder` is for the error message."""
    import requests
    from tqdm import tqdm

    content, errors = bytearray(), list[Exception]()

    def read() -> None:
        try:
            with requests.get(url, stream=True, timeout=30) as response:
                response.raise_for_status()
                size = int(response.headers.get("content-length", 0)) or None
                with tqdm(total=size, unit="B", unit_scale=True, desc=url.rpartition("/")[2]) as bar:
                    for chunk in response.iter_content(2**16):
                        content.extend(chunk)
                        bar.update(len(chunk))
                        if len(content) > LARGEST:
                            raise OSError(f"it is larger than {LARGEST} bytes")
        except (OSError, ValueError) as error:  # those of requests, urllib3 and the URL
            errors.append(error)

    thread = threading.Thread(target=read, daemon=True)  # a slow server could keep each read within its timeout
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        errors.append(TimeoutError())
    if errors:
        status = getattr(getattr(errors[-1], "response", None), "status_code", None)
        reason = f"the server answered {status}" if status else str(errors[-1]) or type(errors[-1]).__name__
        raise UserError(
            f"{url} could not be downloaded ({reason}); check the network, or put the files into {folder} by hand."
        )
    return bytes(content)


def download_corpus(arguments: argparse.Namespace) -> None:
    """Run the command for its parsed arguments."""
    corpus = SOURCES[arguments.corpus]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no partial file remains
    # A KeyboardInterrupt inside exec, as in the import of dataclasses, ends Python by the signal even if caught
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: sys.exit("Interrupted."))
    folder = arguments.to or cache_directory() / corpus.folder
    console.write(corpus.licence)
    source = corpus.url if arguments.source is None else arguments.source
    download(source.rstrip("/") + "/", corpus.files, folder)
    console.write(f"{len(corpus.files)} files in {folder}, every sha256 as expected.")


def main() -> None:
    """Run the command line."""
    parser = ArgumentParser(prog="python -m speechformer.download", description=__doc__.split("\n")[0])
    parser.add_argument("corpus", choices=list(SOURCES))
    parser.add_argument("--to", type=Path, help="folder instead of the user cache; then set corpus.root=FOLDER")
    parser.add_argument("--source", help="another base URL of the same files")
    parser.run(download_corpus)


if __name__ == "__main__":
    main()
