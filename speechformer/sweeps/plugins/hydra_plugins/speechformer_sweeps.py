"""The sweepers and the launcher of speechformer, where Hydra looks for plugins.

`hydra_plugins` is a namespace package: `speechformer.keys` puts the folder above on the path, so that Hydra finds
the module in a checkout, in an editable install and in a wheel. Hydra may load it twice, so it only names classes.
"""

from __future__ import annotations

from speechformer.sweeps import launcher, search, sweeper, tuned


class GridSweeper(sweeper.GridSweeper):
    """`hydra/sweeper=grid`, the default."""


class OptunaSweeper(search.OptunaSweeper):
    """`hydra/sweeper=optuna`."""


class TunedSweeper(tuned.TunedSweeper):
    """`hydra/sweeper=tuned`."""


class EnsembleLauncher(launcher.EnsembleLauncher):
    """`hydra/launcher=ensemble`."""
