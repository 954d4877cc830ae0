"""Selections, segments and quotas in C++."""

import pytest

from support.twins_and_references import in_cpp  # noqa: F401
from support.twins_of_selection import *  # noqa: F403

pytestmark = pytest.mark.usefixtures("in_cpp")
