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


@pytest.mark.parametrize("device", ["meta", cuda])
@pytest.mark.parametrize("name", available())
def test_batches_are_made_on_the_device(name, device, tiny):
    task = load(name, data_dir=None if name == "digits" else tiny)
    expected = task.train.batch([5, 0, 3])
    moved = load(name, data_dir=None if name == "digits" else tiny).to(device)
    batch = moved.train.batch([5, 0, 3])
    assert batch.keys() == expected.keys()
    for key, value in batch.items():
        assert value.device.type == device
        assert (value.shape, value.dtype) == (expected[key].shape, expected[key].dtype)
        if device == "cuda":
            assert torch.equal(value.cpu(), expected[key])
    if task.classes is None:
        return
    prepared = moved.prepare(
        batch["inputs"], training=True, generator=torch.Generator().manual_seed(0)
    )
    on_cpu = task.prepare(
        expected["inputs"], training=True, generator=torch.Generator().manual_seed(0)
    )
    assert prepared.device.type == device
    assert prepared.shape == on_cpu.shape
    if device == "cuda":
        torch.testing.assert_close(prepared.cpu(), on_cpu, rtol=1e-4, atol=1e-4)
