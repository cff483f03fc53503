"""Builds agentrt._core (Cython over the C core) and agentrt._sys (cffi); the rest stands in pyproject.toml."""

from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# The naive models beside the real thing are for C tests only.
SOURCES = sorted(path for path in glob("csrc/*.c") if not path.endswith("_model.c"))

core = Extension(
    "agentrt._core",
    ["pyx/_core.pyx", *SOURCES],
    include_dirs=["csrc"],
    depends=[*glob("csrc/*.h"), *glob("pyx/*.px[di]")],
    # Symbols stay inside: the core is one extension, and another copy may be loaded beside it (tests, the cffi module).
    undef_macros=["NDEBUG"],  # cheap asserts are part of the product; Python's own flags would drop them
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"],
    libraries=["pthread", "dl"],
)


class BuildExt(build_ext):
    """Also puts the extensions beside their sources, where what runs in the clone (python -m pytest) finds them."""

    def run(self) -> None:
        super().run()
        if not self.inplace:
            self.copy_extensions_to_source()


setup(
    ext_modules=cythonize(
        [core],
        include_path=["pyx"],
        compiler_directives={"language_level": "3", "embedsignature": True},
    ),
    cffi_modules=["agentrt/_sys_build.py:ffibuilder"],
    cmdclass={"build_ext": BuildExt},
)
