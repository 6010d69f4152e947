"""Stands in for SGLang's compiled kernels, which exist for GPUs and some CPUs only.

Each name can be imported and none can be called: the native torch code of SGLang is used instead.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(
            f"sgl_kernel.{name} is a stub; choose a backend of SGLang that does not need it"
        )

    return missing
