"""What all tests share: hypothesis draws the same examples every time, so that a red run is a red run for everyone."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

collect_ignore_glob = ["*/programs/*"]  # tests start them as processes

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small tensors: threads of torch only stand in each other's way

_data = Path(__file__).resolve().parents[2] / "shared" / "data"
if _data.is_dir():  # AN4 and others, beside the repository; without them, and ROUNDELAY_DATA, such tests skip
    os.environ.setdefault("ROUNDELAY_DATA", str(_data))

settings.register_profile(
    "roundelay", derandomize=True, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("roundelay")

sys.path.insert(0, str(Path(__file__).parent / "support"))  # worlds with known answers, for several test folders


@pytest.fixture
def one_thread():
    """Sums of several threads differ in their last bits from run to run."""
    import torch  # not above: OMP_NUM_THREADS comes first

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
