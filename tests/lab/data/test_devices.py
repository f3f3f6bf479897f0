"""A whole set on a device: batches are made there, and are those that the CPU makes.

The device `meta` has shapes and no numbers; it shows where tensors of two devices would meet.
"""

import pytest
import torch

from espformer.lab.data import available, load

cuda = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)


# Their batches are made where the texts are.
PAIRS = ("iwslt14", "multi30k")


@pytest.mark.parametrize("device", ["meta", cuda])
@pytest.mark.parametrize("name", [name for name in available() if name not in PAIRS])
def test_batches_are_made_on_the_device(name, device, tiny):
    task = load(name, data_dir=None if name == "digits" else tiny)
    expected = task.train.batch([5, 0, 3])
    on_cpu = task.prepare(
        expected["inputs"], training=True, generator=torch.Generator().manual_seed(0)
    )
    batch = task.train.to(device).batch([5, 0, 3])
    assert batch.keys() == expected.keys()
    for key, value in batch.items():
        assert value.device.type == device
        assert (value.shape, value.dtype) == (expected[key].shape, expected[key].dtype)
        if device == "cuda":
            assert torch.equal(value.cpu(), expected[key])
    for module in (task.augment, task.normalise):
        if module is not None:
            module.to(device)
    prepared = task.prepare(
        batch["inputs"], training=True, generator=torch.Generator().manual_seed(0)
    )
    assert prepared.device.type == device
    assert prepared.shape == on_cpu.shape
    if device == "cuda":
        torch.testing.assert_close(prepared.cpu(), on_cpu, rtol=1e-4, atol=1e-4)
