"""The compiled part: an optional shared library, loaded by gadam.optim.cpu through ctypes.

It includes no header of torch or Python, so one build serves every version of either. Where there is
no compiler, or not one for this, the package installs without it.
"""

import platform

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildKernel(build_ext):
    """Try with OpenMP, then without."""

    def build_extension(self, ext: Extension) -> None:
        if self.compiler.compiler_type == "msvc":
            ext.extra_compile_args = ["/O2", "/openmp:experimental"]
            super().build_extension(ext)
            return
        # Fused multiply-adds and no errno, but infinities and NaN as IEEE 754 has them; integers wrap,
        # for the bits of such numbers are computed with too.
        flags = ["-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
        flags += ["-fwrapv"]
        if platform.machine().lower() in ("x86_64", "amd64"):
            # GCC may move numbers through MMX registers, and leaves the x87 unit, whose registers these
            # are, unusable: every `long double` of the process would be NaN from then on.
            flags += ["-mno-mmx"]
        attempts = [["-fopenmp"], ["-Xpreprocessor", "-fopenmp"], []]
        for openmp in attempts:
            ext.extra_compile_args = flags + openmp
            ext.extra_link_args = ["-fopenmp"] if openmp == ["-fopenmp"] else []
            try:
                super().build_extension(ext)
                return
            except Exception:
                if openmp is attempts[-1]:
                    raise

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """No PyInit function: this is a plain library."""
        return ext.export_symbols


setup(
    ext_modules=[
        Extension(
            "gadam._kernel",
            sources=["csrc/step.c"],
            depends=["csrc/element.h"],
            export_symbols=[
                "gadam_open",
                "gadam_step",
                "gadam_job_size",
                "gadam_has_openmp",
                "gadam_power_f32",
                "gadam_power_f64",
            ],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernel},
)
