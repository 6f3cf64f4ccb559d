"""Everything is in ``pyproject.toml``; this file lets old installers do an editable install."""

from setuptools import setup

setup()
