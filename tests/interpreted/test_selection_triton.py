"""Selections, segments and quotas in Triton, which runs here (see conftest.py)."""

from support.twins_of_selection import *  # noqa: F403
