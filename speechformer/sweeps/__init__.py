"""Many runs at once: sweepers, a launcher, recovery."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "plugins"))  # with the package `hydra_plugins`, which Hydra searches
