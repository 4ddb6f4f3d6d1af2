"""Builds the engine's Python module and carries the engine's sources along, for `colibri build`."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithEngineSources(build_py):
    """Copies engine/ into the installed package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "colibri" / "engine_source"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("engine", target, ignore=shutil.ignore_patterns("build*", "*.o"))


setup(cffi_modules=["src/colibri/_engine_build.py:ffi"], cmdclass={"build_py": WithEngineSources})
