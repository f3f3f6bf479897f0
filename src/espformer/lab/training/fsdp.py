"""FSDP: every process holds a part of each weight, and checkpoints are those of one process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from espformer.lab.training.checkpoints import read_checkpoint


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Share out the weights of each block, and then what is left of the model."""
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if hasattr(model, "attention_matrices"):  # a way into the model beside its forward
        register_fsdp_forward_method(model, "attention_matrices")


class ShardedStrategy(ModelParallelStrategy):
    """FSDP as torch has it today, on GPUs and on the CPU.

    A checkpoint is one file with whole tensors, the same that one process writes and reads. It is
    read by every process, with all that :func:`read_checkpoint` refuses.

    Args:
        devices: number of processes.
    """

    def __init__(self, devices: int) -> None:
        super().__init__(devices, 1, save_distributed_checkpoint=False)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        del weights_only
        checkpoint = read_checkpoint(Path(self.broadcast(checkpoint_path)))
        assert self.model is not None
        own = dict(self.model.named_parameters())
        self.model.load_state_dict(
            {name: _like(own.get(name), value) for name, value in checkpoint["state_dict"].items()}
        )
        for optimizer, state in zip(
            self.optimizers, checkpoint.get("optimizer_states", []), strict=False
        ):
            optimizer.load_state_dict(_distributed(optimizer, state))
        return checkpoint


def _distributed(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimiser with moments that lie as the weights do.

    Who saved it may have counted the weights in another order, but not within the groups.
    """
    state = {}
    for group, former in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for parameter, index in zip(group["params"], former["params"], strict=True):
            if index in saved["state"]:
                values = saved["state"][index].items()
                state[index] = {name: _like(parameter, value) for name, value in values}
    return {"state": state, "param_groups": saved["param_groups"]}


def _like(parameter: Tensor | None, value: Any) -> Any:
    """Shard a whole tensor as the parameter that it belongs to; leave other values as they are."""
    if not isinstance(parameter, DTensor) or getattr(value, "shape", None) != parameter.shape:
        return value
    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements
    )
