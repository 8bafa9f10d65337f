"""DeepSpeed in a process that runs several engines one after the other."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def deepspeed_of_its_own() -> Iterator[None]:
    """Forget its process groups at the end, and have it compile nothing."""
    warnings.simplefilter("ignore")  # of its imports
    import deepspeed.ops  # noqa: PLC0415
    from deepspeed.comm import comm  # noqa: PLC0415
    from deepspeed.utils import groups  # noqa: PLC0415

    deepspeed.ops.__compatible_ops__.clear()
    with mock.patch.dict(vars(groups)), mock.patch.dict(vars(comm)):
        yield
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
