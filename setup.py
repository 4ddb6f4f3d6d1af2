"""Builds the engine's Python module from engine/ and carries the engine's sources along, for `colibri build`."""

import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py


class WithEngine(build_ext):
    """Compiles libcolibri.a with the engine's own Makefile, so that its flags stand in one place, and links it in."""

    def run(self) -> None:
        build = Path(self.build_temp).resolve() / "engine"
        subprocess.run(["make", "-s", "-C", "engine", f"BUILD={build}", f"{build}/libcolibri.a"], check=True)
        for extension in self.extensions:
            extension.extra_objects = [str(build / "libcolibri.a")]
        super().run()


class WithEngineSources(build_py):
    """Copies engine/ into the installed package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "colibri" / "engine_source"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("engine", target, ignore=shutil.ignore_patterns("build*", "*.o"))


setup(
    cffi_modules=["src/colibri/_engine_build.py:ffi"],
    cmdclass={"build_ext": WithEngine, "build_py": WithEngineSources},
)
