"""Fetch a public corpus into the user cache: `python -m speechformer.download speeches`.

Every file is checked against the sha256 that stands here; a file that differs is refused and not kept. Training
never touches the network: this command is the only part of the project that does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from speechformer.corpora.files import cache_directory
from speechformer.refusals import UserError

SPEECHES_SOURCE = (
    "https://raw.githubusercontent.com/yasho191/ScratchLLM/85b6308efcbf4f6ce0481c0120d3f4eedeb9a73f/speechesdataset/"
)
SPEECHES = {
    "test_CLS.tsv": "31277b7d67cff8ad717c9f43c05810c6b78feb67f04472bd7aa20e71eb2e0da8",
    "test_LM_hbush.txt": "a0592374b7cd47a6417a311892a4b8a59f35cbe054cbaf96c06e50e904c8451f",
    "test_LM_obama.txt": "6cb3bb657ae40cab1cb8f3f38f391dbdcc80a9b21b577d5fc1ea4ba86901bed2",
    "test_LM_wbush.txt": "1281773860075b12727f9f581940c028074d05f3efbf99bbfcc9c7c472d4dbd5",
    "train_CLS.tsv": "7dbd7cadc6efe746d0c0a7e5fe81f0ac2431bd2a3b86b51f4cb23f373466c88e",
    "train_LM.txt": "aff1d88fad90db8cedfe8918a9099ffdfe622641a2a8c6e25dac1f7eda199b1a",
}


def download(source: str, files: dict[str, str], folder: Path) -> None:
    """Fetch `files` (name: sha256) from `source`, a URL that ends with a slash, into `folder`.

    A file that is there already and right is not fetched again.

    Raises:
        UserError: the source does not answer, or a file's sha256 differs.
    """
    import pooch
    import requests

    if not source.startswith(("http://", "https://")):
        raise UserError(f"--source must be a URL that begins with http:// or https://, not {source}.")
    pooch.get_logger().setLevel("WARNING")
    fetcher = pooch.create(path=folder, base_url=source, registry=files)
    for name in files:
        try:
            fetcher.fetch(name, progressbar=True)
        except (requests.RequestException, OSError) as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            reason = f"the server answered {status}" if status else type(error).__name__
            raise UserError(
                f"{source}{name} could not be fetched ({reason}); check the network, or put "
                f"the files into {folder} by hand."
            ) from None
        except ValueError:  # pooch's, for a wrong hash
            raise UserError(
                f"{source}{name} is not the file expected (its sha256 differs) and was not kept; the source may "
                "have changed, or something on the way altered it."
            ) from None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m speechformer.download", description=__doc__.split("\n")[0])
    parser.add_argument("corpus", choices=["speeches"])
    parser.add_argument("--to", type=Path, help="a folder instead of the user cache; then set corpus.root=FOLDER")
    parser.add_argument("--source", default=SPEECHES_SOURCE, help="another place with the same files")
    arguments = parser.parse_args()
    folder = arguments.to or cache_directory() / "speeches"
    try:
        download(arguments.source.rstrip("/") + "/", SPEECHES, folder)
    except UserError as error:
        sys.exit(f"Error: {error}")
    print(f"{len(SPEECHES)} files in {folder}, every sha256 as expected.")


if __name__ == "__main__":
    main()
