"""What every test has: fixed seeds, and operators whose uninitialised buffers hold NaN."""

import contextlib
import functools
import os
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

# Without a GPU the kernels run in Triton's interpreter, which must be told before they are defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):  # no triton
        from tests.interpreter import hasten

        hasten()

# The same examples every time: what fails on one machine fails on all of them. Machines with a GPU
# need not have hypothesis: the tests that are for them do without.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("espformer", derandomize=True, deadline=None, database=None)
    settings.load_profile("espformer")

# torch notes once and for all which functions ``with torch.device(...)`` minds: let it see the true
# ones, not those that tests put in their place.
with torch.device("cpu"):
    torch.empty(0)

# Where a buffer that nobody wrote to must not go unnoticed.
OPERATORS = {"ops", "functional", "gpu"}


# Beginnings of the names of tests that take seconds, beside smaller ones of the same kind that stay
# in `make test`: these are run by `make test-slow`. CONTRIBUTING.md says why.
SLOW = (
    "functional/test_checkpointing.py::test_same_gradients[triton-soft-",
    "functional/test_compile.py::test_breaks_in_the_graph_do_no_harm",
    "functional/test_compile.py::test_compiled_is_eager[cpu-hard]",
    "functional/test_compile.py::test_compiled_is_eager[cpu-squared-masked]",
    "functional/test_compile.py::test_compiled_is_eager[linear-squared-masked]",
    "functional/test_compile.py::test_compiled_is_eager[linear]",
    "functional/test_gradients.py::test_across_chunks[both-squared]",
    "functional/test_gradients.py::test_cross_attention[N3-M6",
    "functional/test_linear_is_dense.py::test_masks[N33-M70",
    "functional/test_linear_is_dense.py::test_sizes_and_temperatures[B1-H1-N257",
    "functional/test_linear_is_dense.py::test_sizes_and_temperatures[B1-H2-N63",
    "integrations/test_onnx.py::test_hardened_bert",
    "integrations/test_onnx.py::test_outputs_have_the_names_of_the_model",
    "integrations/test_onnx.py::test_program_serves_all_sizes[average]",
    "lab/bench/test_tables.py::test_torch_alone_is_enough",
    "lab/training/test_resume.py::test_resumed_at_every_step_it_ends_the_same[bf16-workers]",
    "ops/common/test_launch.py::test_calls_of_a_known_shape_do_not_pass_through_triton",
    "ops/esp/cpu/test_citizens.py::test_kernels_that_a_forked_process_calls_first[before]",
    "ops/esp/triton/test_attention.py::test_a_hard_soft_sort_exerts_no_force[absolute-both]",
    "ops/esp/triton/test_attention.py::test_a_hard_soft_sort_exerts_no_force[squared-",
    "ops/esp/triton/test_attention.py::test_close_numbers_beside_one_far_away[squared]",
    "ops/esp/triton/test_attention.py::test_cross_attention[quantile-padded]",
    "ops/esp/triton/test_attention.py::test_default_dtype_does_not_matter[0.0-float64]",
    "ops/esp/triton/test_attention.py::test_default_dtype_does_not_matter[1.0-float16]",
    "ops/esp/triton/test_attention.py::test_half_precision_with_more_keys",
    "ops/esp/triton/test_attention.py::test_padded_half_precision[mean]",
    "ops/esp/triton/test_attention.py::test_padded_half_precision[rows]",
    "ops/esp/triton/test_attention.py::test_self_attention[full-mean]",
    "ops/esp/triton/test_attention.py::test_self_attention[full-rows]",
    "ops/esp/triton/test_citizens.py::test_compiles_without_graph_breaks[soft]",
    "ops/esp/triton/test_citizens.py::test_soft_attention[costs of two lengths]",
    "ops/esp/triton/test_citizens.py::test_soft_attention[gradient of the values]",
    "ops/esp/triton/test_citizens.py::test_soft_attention[keeping states]",
    "ops/esp/triton/test_citizens.py::test_soft_attention[two lengths]",
    "ops/esp/triton/test_hard.py::test_columns_that_are_not_finite[at-once-torch.float16",
    "ops/esp/triton/test_hard.py::test_columns_that_are_not_finite[at-once-torch.float32-key-",
    "ops/esp/triton/test_hard.py::test_columns_that_are_not_finite[at-once-torch.float32-query--inf",
    "ops/esp/triton/test_hard.py::test_columns_that_are_not_finite[in-runs-torch.float16-key-inf",
    "ops/esp/triton/test_hard.py::test_columns_that_are_not_finite[in-runs-torch.float16-query",
    "ops/esp/triton/test_hard.py::test_columns_that_are_not_finite[in-runs-torch.float32",
    "ops/esp/triton/test_hard.py::test_gathers[130-40-3]",
    "ops/esp/triton/test_hard.py::test_ranks_are_those_of_a_stable_sort[at-once-100",
    "ops/esp/triton/test_hard.py::test_ranks_are_those_of_a_stable_sort[at-once-33-torch.float16-full",
    "ops/esp/triton/test_hard.py::test_ranks_are_those_of_a_stable_sort[in-runs-100",
    "ops/esp/triton/test_hard.py::test_ranks_are_those_of_a_stable_sort[in-runs-33-torch.float32-full",
    "ops/esp/triton/test_hard.py::test_runs_are_merged[70]",
    "ops/esp/triton/test_plan_kernels.py::test_balanced_scales[absolute-0.3-full]",
    "ops/esp/triton/test_plan_kernels.py::test_balanced_scales[squared-",
    "ops/esp/triton/test_plan_kernels.py::test_norm_costs[dense-absolute-",
    "ops/esp/triton/test_plan_kernels.py::test_norm_costs[dense-squared-0.1-added",
    "ops/esp/triton/test_plan_kernels.py::test_norm_costs[scans-squared-0.1-added",
    "ops/esp/triton/test_plan_kernels.py::test_norm_costs[scans-squared-0.1-by slice-balanced",
    "ops/esp/triton/test_plan_kernels.py::test_plans[PlanKernels-absolute-1-2-11-40-",
    "ops/esp/triton/test_plan_kernels.py::test_plans[PlanKernels-absolute-1-2-33-2-",
    "ops/esp/triton/test_plan_kernels.py::test_plans[PlanKernels-absolute-2-1-11-32-",
    "ops/esp/triton/test_plan_kernels.py::test_plans[PlanKernels-absolute-2-2-11-5-",
    "ops/esp/triton/test_plan_kernels.py::test_plans[PlanKernels-squared-1-1-33-2-",
    "ops/esp/triton/test_plan_kernels.py::test_plans[PlanKernels-squared-1-1-8-64-",
    "ops/esp/triton/test_plan_kernels.py::test_plans[PlanKernels-squared-1-2-11-4-",
    "ops/esp/triton/test_plan_kernels.py::test_row_scales[scans-squared-0.01-",
    "ops/esp/triton/test_plan_kernels.py::test_row_scales[scans-squared-0.1-full]",
    "ops/esp/triton/test_plan_kernels.py::test_two_sides_are_twice_as_many_heads[dense-absolute-",
    "ops/esp/triton/test_plan_kernels.py::test_two_sides_are_twice_as_many_heads[dense-squared-balanced]",
    "ops/esp/triton/test_plan_kernels.py::test_two_sides_are_twice_as_many_heads[scans-squared-",
    "ops/esp/triton/test_sort.py::test_points_order_and_gradients[at-once-torch.float16",
    "ops/esp/triton/test_sort.py::test_points_order_and_gradients[in-runs-torch.float32",
    "ops/esp/triton/test_sort.py::test_two_sides_are_sorted_like_one[in-runs-own]",
    "ops/esp/triton/test_sort.py::test_two_sides_are_sorted_like_one[in-runs-shared]",
    "sorting/test_against_dense.py::test_permutations[200-",
    "sorting/test_against_dense.py::test_permutations[33-",
    "sorting/test_behaviour.py::test_extremes_stay_finite[absolute-equal-soft_permutation]",
    "sorting/test_behaviour.py::test_extremes_stay_finite[absolute-near-soft_permutation]",
    "sorting/test_behaviour.py::test_extremes_stay_finite[squared-",
)


# What `SLOW` names and no test is called any more; `tests/test_package.py` looks at it.
RENAMED = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Tests of the kernels of soft sorts stand before those of the functions that call them: one
    # worker compiles what both need, where two would compile it twice.
    here = next((i for i, item in enumerate(items) if item.path.parts[-2] == "sorting"), 0)
    kernels = [item for item in items[:here] if item.path.name == "test_one_side.py"]
    items[:here] = [*(item for item in items[:here] if item not in kernels), *kernels]
    names = [item.nodeid.removeprefix("tests/") for item in items]
    for item, name in zip(items, names, strict=True):
        if name.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    functions = {name.partition("[")[0] for name in names}
    config.stash[RENAMED] = [
        slow
        for slow in SLOW
        if slow.partition("[")[0] in functions and not any(x.startswith(slow) for x in names)
    ]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none here"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poisoned_buffers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.empty`` and its kin return NaN (integers: their lowest value) in operator tests."""
    if OPERATORS & set(request.path.parts):
        monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
        monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
        monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def wrapper(*args: object, **options: object) -> torch.Tensor:
        buffer = make(*args, **options)
        with torch.no_grad():
            if buffer.is_floating_point() or buffer.is_complex():
                buffer.fill_(torch.nan)
            elif buffer.dtype != torch.bool:
                buffer.fill_(torch.iinfo(buffer.dtype).min)
        return buffer

    return wrapper
