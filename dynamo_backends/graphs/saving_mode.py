"""Whether PyTorch saves what it compiles."""

from __future__ import annotations

import itertools
import random

from torch._dynamo import bytecode_transformation
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config


def is_ahead_of_time() -> bool:
    """Whether ``torch.compile(...).aot_compile(...)`` calls the backend (``torch/_dynamo/aot_compile.py``)."""
    return bool(functorch_config.bypass_autograd_cache_key and functorch_config.bundled_autograd_cache)


def is_precompiling() -> bool:
    """Whether PyTorch saves all that it compiles, with Dynamo's guards."""
    return bool(dynamo_config.caching_precompile)


def is_saving() -> bool:
    """Whether PyTorch saves the results of compilers: for ``aot_compile``, or in AOTAutograd's cache."""
    return bool(functorch_config.bundled_autograd_cache) or is_precompiling()


def number_apart() -> None:
    """Makes Dynamo number what it creates from a random number on, if PyTorch saves compiles.

    In PyTorch 2.13 the numbers begin at 0 in each process. So a function that is traced beside one that was loaded
    fails with ``Name '__builtins_dict___0' already exists in scope``.
    """
    if is_precompiling():
        bytecode_transformation._unique_id_counter = itertools.count(random.SystemRandom().randrange(2**40))
