"""The compiled kernels as torch and the machine see them: operators, threads, the cache on disk."""

import logging
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("numba")

import espformer
from espformer.functional.esp import pick_backend
from espformer.ops.esp import cpu, linear
from espformer.ops.esp.cpu import compiling, operators, threads
from tests.compare import differentiate, tokens
from tests.opcheck import check_operator
from tests.processes import run_beside_torch


def arguments(hard: bool = False) -> tuple:
    query, key, value = (x.requires_grad_() for x in tokens(2, n=6))
    points = [x.detach().mT.contiguous().requires_grad_(not hard) for x in (query, key)]
    width = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=not hard)
    logits = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    options = (0.5, "absolute", "rows", hard, "stable", "")
    return query, key, value, *points, width, logits, key.detach()[:, 0], None, None, *options


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_operator(hard):
    check_operator(operators.attend, arguments(hard))


def test_operator_of_the_backward():
    outputs = operators.attend(*(x.detach() if hasattr(x, "detach") else x for x in arguments()))
    query, key, value, _, _, width, _, centre, _, _, *options = arguments()
    saved = [x.detach() for x in (*outputs, query, key, value, width, centre)]
    for flags in ((True, True, True), (False, False, False), (True, False, False)):
        upstream = torch.ones_like(outputs[0])
        check_operator(operators.attend_backward, (upstream, *saved, *options, *flags))


def test_second_derivatives_are_refused():
    query, key, value = (x.requires_grad_() for x in tokens(1, n=5))
    out = espformer.esp_attention(query, key, value, backend="cpu")
    (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once, not twice"):
        grad.sum().backward()


@pytest.fixture(params=["torch's threads", "own threads"])
def _two_threads(monkeypatch, request):
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "WORTH_A_THREAD", 1)
    if request.param == "own threads":
        monkeypatch.setattr(threads._pool, "openmp", None)
    elif threads._pool.openmp is None:
        pytest.skip("torch has no OpenMP of GNU's here")
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("metric", ["absolute", "squared"])
@pytest.mark.usefixtures("_two_threads")
def test_threads_find_the_same(heads, metric):
    inputs = tokens(1, heads, n=50, head_dim=5)
    options = {"backend": "cpu", "metric": metric, "inverse_temperature": 0.5}
    options["sort_temperature"] = torch.tensor(0.3, dtype=torch.float64)
    both = differentiate(*inputs, **options)
    again = differentiate(*inputs, **options)
    torch.set_num_threads(1)
    alone = differentiate(*inputs, **options)
    for name, expected in alone.items():
        assert torch.equal(both[name], again[name]), name  # the same sums every time
        torch.testing.assert_close(both[name], expected, msg=name)


@pytest.mark.usefixtures("_two_threads")
def test_calls_from_several_threads():
    inputs = tokens(1, 3, n=50)
    expected = differentiate(*inputs, backend="cpu")
    wrong = []

    def call() -> None:
        for _ in range(5):
            found = differentiate(*inputs, backend="cpu")
            wrong.extend(name for name in expected if not torch.equal(found[name], expected[name]))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.usefixtures("_two_threads")
def test_every_share_is_worked_on_once_and_errors_are_heard():
    work, done = threads.split_work(7, 1, 1 << 40), []

    def kernel(h0, h1, l0, l1, index):
        done.append((h0, h1))
        if index == len(work) - 1:
            raise ArithmeticError("here")

    with pytest.raises(ArithmeticError, match="here"):
        threads.run(kernel, work, lambda index: (index,))
    assert sorted(done) == [(share.h0, share.h1) for share in work]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_has_threads_of_its_own():
    """OpenMP would wait for those that it left behind."""
    done = run_beside_torch(
        """
        import os, signal, torch, espformer
        from espformer.ops.esp.cpu import threads
        threads.WORTH_A_THREAD = 1
        torch.set_num_threads(2)
        q, k, v = torch.randn(3, 1, 4, 50, 4).unbind()
        expected = espformer.esp_attention(q, k, v, backend="cpu")
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            work, done = threads.split_work(4, 1, 1 << 40), []
            threads.run(lambda *share: done.append(share[:2]), work, lambda index: ())
            os._exit(0 if sorted(done) == [share[:2] for share in work] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(espformer.esp_attention(q, k, v, backend="cpu"), expected)
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.parametrize("imported", ["before", "after"])
def test_kernels_that_a_forked_process_calls_first(imported):
    """The parent has used torch's threads, and not the kernels."""
    done = run_beside_torch(
        f"""
        import multiprocessing, signal, torch
        if {imported == "before"}:
            import espformer

        def child():
            signal.alarm(60)
            from espformer.sorting import soft_sort
            from espformer.ops.esp.cpu import threads
            threads.WORTH_A_THREAD = 1
            assert soft_sort(torch.randn(4, 50)).shape == (4, 50)

        torch.set_num_threads(2)
        torch.randn(1 << 20).exp()
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0, process.exitcode
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_thread_that_cannot_begin_loses_nothing(monkeypatch):
    """OpenMP may give one thread only; and ctypes drops what a signal's handler raises early."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    work, done = threads.split_work(7, 1, 1 << 40), []

    def kernel(h0, h1, *_):
        done.append((h0, h1))

    monkeypatch.setattr(threads._pool, "openmp", lambda body, *_: body(None))
    threads.run(kernel, work, lambda index: ())
    assert done == [share[:2] for share in work]
    monkeypatch.setattr(threads._pool, "openmp", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        threads.run(kernel, work, lambda index: ())


def test_no_team_is_smaller_than_those_of_torch(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(threads._pool, "openmp", pytest.fail)
    done = []
    work = [threads.Share(i, i + 1, 0, 1, 0) for i in range(3)]
    threads.run(lambda h0, *_: done.append(h0), work, lambda index: ())
    assert sorted(done) == [0, 1, 2]


@pytest.mark.parametrize(("heads", "slices"), [(1, 1), (1, 8), (3, 8), (8, 3), (5, 2)])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_cover_everything_once(heads, slices, count, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    found = threads.split_work(heads, slices, 1 << 40)
    cells = [(h, l) for s in found for h in range(s.h0, s.h1) for l in range(s.l0, s.l1)]
    assert sorted(cells) == [(h, l) for h in range(heads) for l in range(slices)]
    for head in range(heads):  # what is added up has a place of its own
        parts = [s.part for s in found if s.h0 <= head < s.h1]
        assert parts == list(range(len(parts)))


# What a future numba may lack, or may have changed.
CHANGES = {
    "a name": "del numba.core.codegen.JITCodeLibrary",
    "an attribute of a module": "del numba.core.event.Listener",
    "a signature": "numba.core.codegen.JITCodeLibrary.__init__ = lambda self: None",
    "an option": "numba.core.options.TargetOptions.parse_as_flags = None",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_with_a_numba_that_has_changed_the_torch_operator_is_used(change, tmp_path):
    done = run_beside_torch(
        f"""
        import os, warnings
        os.environ["NUMBA_CACHE_DIR"] = {str(tmp_path)!r}  # else a kernel could be found compiled
        import numba.core.codegen, numba.core.event, numba.core.options
        {change}
        import torch
        import espformer
        x = torch.randn(1, 1, 5, 3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [espformer.esp_attention(x, x, x), espformer.esp_attention(x, x, x)]
        expected = espformer.esp_attention(x, x, x, backend="linear")
        assert all(torch.equal(y, expected) for y in found)
        said = [str(x.message) for x in caught if "numba" in str(x.message)]
        assert said and all(f"compiled with numba {{numba.__version__}}" in x for x in said), said
        try:
            espformer.esp_attention(x, x, x, backend="cpu")
        except ImportError as error:
            assert "does not work here" in str(error) and "linear" in str(error), error
        else:
            raise AssertionError("kernels were used")
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_numba_that_computes_other_numbers_is_found_out(monkeypatch):
    from espformer.ops.esp.cpu import trial

    trial.try_kernel()
    right = trial._trial
    monkeypatch.setattr(trial, "_trial", lambda x, y: right(x, y) + 1)
    with pytest.raises(ArithmeticError, match="expected"):
        trial.try_kernel()


def test_without_numba_the_torch_operator_is_used():
    done = run_beside_torch(
        """
        import sys
        sys.modules["numba"] = sys.modules["llvmlite"] = None
        import torch, espformer
        q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
        auto = espformer.esp_attention(q, k, v)
        assert torch.equal(auto, espformer.esp_attention(q, k, v, backend="linear"))
        try:
            espformer.esp_attention(q, k, v, backend="cpu")
        except ImportError as error:
            assert "numba: pip install numba" in str(error)
        else:
            raise AssertionError
        """
    )
    assert done.returncode == 0, done.stderr


def test_other_devices_are_refused():
    meta = torch.zeros(1, 2, 4, 4, device="meta")
    with pytest.raises(ValueError, match="needs tensors on a CPU, got tensors on meta"):
        espformer.esp_attention(meta, meta, meta, backend="cpu")


def double(x):
    return 2 * x


def picked(*tensors: torch.Tensor) -> object:
    return pick_backend("test", "auto", *tensors)


class Wrapped(torch.Tensor):
    """A subclass that knows torch's own operators."""


def test_auto_takes_the_kernels_where_they_can_run():
    x = torch.randn(1, 4, 4)
    assert picked(x) is cpu
    assert picked(x, torch.nn.Parameter(x)) is cpu
    assert picked(x.as_subclass(Wrapped)) is linear
    with torch._subclasses.FakeTensorMode():
        assert picked(torch.empty(1, 4, 4)) is linear
    with FlopCounterMode(display=False):
        assert picked(x) is linear
    traced = []
    torch.jit.trace(lambda x: traced.append(picked(x)) or x + 1, x, check_trace=False)
    assert traced == [linear]


class Attend(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return espformer.esp_attention(x, x, x)


def test_exported_programs_are_made_of_torch_operators():
    x = torch.randn(1, 2, 8, 4)
    program = torch.export.export(Attend(), (x,))
    assert "espformer" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), Attend()(x))


def test_a_directory_that_cannot_be_written_to_is_no_error(tmp_path, monkeypatch):
    """Neither when the cache is looked for, nor when something was compiled and shall be kept."""
    kernel, missing = compiling.kernel(double), tmp_path / "none" / "such"
    monkeypatch.setattr(kernel._cache, "_cache_path", str(missing))
    monkeypatch.setattr(kernel._cache._impl.locator, "ensure_cache_path", lambda: None)
    assert kernel(2) == 4
    assert not missing.exists()
    signature = kernel.nopython_signatures[0]
    assert kernel._cache.load_overload(signature, kernel.targetctx) is None

    def nowhere(self: object, function: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(compiling._KernelCache, "__init__", nowhere)
    assert compiling.kernel(double)(1) == 2


def test_kernels_are_kept_for_what_the_sources_say(tmp_path):
    """Another state of any file of the package is another name."""
    function = cpu.soft_plan.sort_side.py_func
    one, other = compiling._KernelCache(function), compiling._KernelCache(function)
    one._choose_file("signature")
    stamp, compiling.STAMP = compiling.STAMP, "another"
    try:
        other._choose_file("signature")
    finally:
        compiling.STAMP = stamp
    assert Path(one._cache_file._index_path).name != Path(other._cache_file._index_path).name


@pytest.fixture
def said(monkeypatch):
    """What the logger is told, whatever other tests have left of its handlers and levels."""
    lines = []
    monkeypatch.setattr(logging.getLogger("espformer"), "warning", lines.append)
    return lines


@pytest.mark.parametrize("seconds", [0.0, 0.3], ids=["short", "long"])
def test_a_long_compilation_is_announced(seconds, said, monkeypatch):
    """Once, and only if it takes longer than anyone waits without asking."""
    monkeypatch.setattr(compiling._Announcer, "PATIENCE", 0.1)
    announcer = compiling._Announcer()
    started = SimpleNamespace(data={"dispatcher": cpu.soft_plan.sort_side})
    for _ in range(2):
        announcer.on_start(started)
        announcer.on_start(started)  # a part, compiled on the way
        announcer.on_end(started)
        time.sleep(seconds)
        announcer.on_end(started)
    time.sleep(0.15)
    assert len(said) == (seconds > 0)
    assert all("compiles its CPU kernels" in line for line in said)


@pytest.mark.parametrize("module", ["textwrap", None])
def test_other_packages_compile_without_a_word(said, monkeypatch, module):
    """Functions that `exec` made have no module."""
    monkeypatch.setattr(compiling._Announcer, "PATIENCE", 0.01)
    others = SimpleNamespace(py_func=SimpleNamespace(__module__=module))
    announcer = compiling._Announcer()
    announcer.on_start(SimpleNamespace(data={"dispatcher": others}))
    time.sleep(0.05)
    announcer.on_end(SimpleNamespace(data={"dispatcher": others}))
    assert not said
