"""The chunked loss against the plain one, and where a careless one is wrong."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import references
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.loss import IGNORE_INDEX, cross_entropy_sum, shift, softmax_step
from lm.softmax import find_compiler, library, native_softmax_step

native = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler is on the path")
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Case(NamedTuple):
    hidden: Tensor  # (B, T, D)
    weight: Tensor  # (V, D)
    targets: Tensor  # (B, T)


class Result(NamedTuple):
    loss: Tensor
    hidden_grad: Tensor
    weight_grad: Tensor


def draw(logit_scale: float = 1.0) -> Case:
    generator = torch.Generator().manual_seed(0)
    hidden = logit_scale * torch.randn(2, 5, 12, generator=generator)
    weight = torch.randn(11, 12, generator=generator)
    return Case(hidden, weight, torch.randint(11, (2, 5), generator=generator))


def without_some_targets() -> Case:
    hidden, weight, targets = draw()
    targets[0, 1:3] = targets[1, 4] = IGNORE_INDEX
    return Case(hidden, weight, targets)


def confident() -> Case:
    """Hidden states along their target's row: every probability is near its mean of 0.9993."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.linalg.qr(torch.randn(64, 61, generator=generator)).Q.T  # (V, D)
    targets = torch.randint(61, (3, 29), generator=generator)
    # One length for all would round every logit to bf16 in the same direction.
    length = 10.9 + torch.rand(3, 29, 1, generator=generator)
    return Case(length * weight[targets], weight, targets)


def run(case: Case, loss: Callable[..., Tensor], *options: object) -> Result:
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    total = loss(hidden, weight, case.targets, *options)
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return Result(total.detach(), hidden.grad, weight.grad)


def run_in_bf16(case: Case, step: Step = softmax_step) -> Result:
    with torch.autocast("cpu", torch.bfloat16):
        return run(case, cross_entropy_sum, 20, step)


def relative_error(measured: Tensor, expected: Tensor) -> float:
    return ((measured - expected).norm() / expected.norm()).item()


def softmax_step_in_bf16(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What an unsound kernel does: softmax and p - 1 in the logits' own type."""
    share = logits.softmax(dim=1)
    loss = -share.gather(1, targets.unsqueeze(1)).squeeze(1).log()
    return loss, share.scatter_add(1, targets.unsqueeze(1), torch.full_like(share[:, :1], -1))


# Values and gradients


@pytest.mark.parametrize("step", [softmax_step, pytest.param(native_softmax_step, marks=native)])
@pytest.mark.parametrize("chunk_rows", [1, 4, 10, 1024], ids="{}_rows".format)
@pytest.mark.parametrize(
    "case",
    [draw(), without_some_targets(), confident(), draw(logit_scale=1e-3), draw(logit_scale=20)],
    ids=["random", "ignored rows", "confident", "small logits", "large logits"],
)
def test_loss_and_gradients_equal_the_plain_ones(case: Case, chunk_rows: int, step: Step) -> None:
    wide = Case(case.hidden.double(), case.weight.double(), case.targets)
    expected = run(wide, references.cross_entropy_sum)
    result = run(case, cross_entropy_sum, chunk_rows, step)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5, check_dtype=False)


def test_huge_logits_overflow_nothing() -> None:
    losses, gradient = softmax_step(torch.tensor([[1e30, -1e30, 0.0]]), torch.tensor([0]))
    assert losses.tolist() == [0.0]
    assert gradient.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("rows", [0, 5], ids=["no rows", "ignored rows"])
def test_a_batch_without_targets_has_no_loss_and_no_gradient(rows: int) -> None:
    hidden, weight, _ = draw()
    targets = torch.full((2, rows), IGNORE_INDEX)
    result = run(Case(hidden[:, :rows], weight, targets), cross_entropy_sum, 4)
    assert all(not value.any() for value in result)


def by_vocabulary(logits: Tensor) -> Tensor:
    """The same logits in the order in which the loss makes them on a CPU."""
    return logits.T.contiguous().T


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.1, 3.0, 1e4], ids="logits of {}".format)
@pytest.mark.parametrize(
    ("rows", "vocab"), [(1, 1), (1, 5), (7, 11), (129, 300), (300, 17), (256, 4099)]
)
def test_the_native_step_equals_the_plain_one(
    rows: int, vocab: int, scale: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (scale * torch.randn(rows, vocab, generator=generator)).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[3::5] = IGNORE_INDEX
    # Half of them confident.
    sure = torch.arange(0, rows, 2)
    logits[sure, targets[sure].clamp(min=0)] = logits.float().abs().max().to(dtype) + 8
    wide = logits.double().requires_grad_()
    losses = F.cross_entropy(wide, targets, ignore_index=IGNORE_INDEX, reduction="none")
    losses.sum().backward()
    gradient, losses = cast(Tensor, wide.grad), losses.detach()
    given = by_vocabulary(logits)
    ours, ours_gradient = native_softmax_step(given, targets)
    assert ours_gradient is given  # which only the kernel writes over in every type
    torch.testing.assert_close(ours, losses, rtol=2e-6, atol=1e-6, check_dtype=False)
    # A log-sum is a float of the size of the logits, and the target's entry as exact as the loss.
    tolerance = 1e-6 + 2**-23 * logits.float().abs().max().item()
    tolerance += 0 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(
        ours_gradient, gradient, rtol=tolerance, atol=1e-6, check_dtype=False
    )
    assert not ours_gradient[targets == IGNORE_INDEX].any()


@native
def test_the_native_step_has_the_same_bits_on_any_number_of_threads() -> None:
    logits, targets = torch.randn(130, 5003).bfloat16(), torch.randint(5003, (130,))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(native_softmax_step(by_vocabulary(logits), targets))
    finally:
        torch.set_num_threads(before)
    for losses, gradient in results[1:]:
        assert torch.equal(losses, results[0][0])
        assert torch.equal(gradient, results[0][1])


@native
def test_the_kernel_leaves_small_numbers_of_the_process_alone() -> None:
    library()
    assert torch.tensor(1e-40) * 1.0 == torch.tensor(1e-40) != 0.0
    assert float("1e-310") * 1.0 != 0.0


@native
def test_the_native_step_takes_targets_with_gaps_and_refuses_those_outside() -> None:
    logits, targets = torch.randn(4, 9), torch.tensor([3, 0, 8, 0, 1, 0, 5, 0])[::2]
    losses, _ = native_softmax_step(by_vocabulary(logits), targets)
    torch.testing.assert_close(losses, softmax_step(logits.clone(), targets)[0])
    for outside in (9, -1):
        targets = torch.tensor([0, outside, 1, 2])
        with pytest.raises(IndexError, match=f"target {outside} is not in a vocabulary of 9"):
            native_softmax_step(by_vocabulary(logits), targets)


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_native_step_hides_no_logit_that_is_not_finite(bad: float, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 40, dtype=dtype)
    logits[1, 7] = bad
    losses, gradient = native_softmax_step(by_vocabulary(logits), torch.tensor([0, 1, 2]))
    assert losses.isfinite().tolist() == [True, False, True]
    assert gradient.isfinite().all(dim=1).tolist() == [True, False, True]


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        OSError, match=r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\) is on the path"
    ):
        inspect.unwrap(library)()


@native
def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("lm.softmax.FLAGS", ["-no-such-flag"])
    with pytest.raises(OSError, match=r"cannot build softmax\.cpp: .*no-such-flag"):
        inspect.unwrap(library)()
    assert not list((tmp_path / "relight").iterdir())


@native
@pytest.mark.parametrize("kept", [0, 5000])
def test_a_damaged_kernel_is_built_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    inspect.unwrap(library)()
    [path] = (tmp_path / "relight").iterdir()
    whole = path.read_bytes()
    path.unlink()  # this process has it mapped
    path.write_bytes(whole[:kept])
    assert inspect.unwrap(library)().room_rows() > 0
    assert [file.stat().st_size for file in (tmp_path / "relight").iterdir()] == [len(whole)]


@native
def test_the_kernel_is_built_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert inspect.unwrap(library)().room_rows() > 0


def test_a_second_backward_pass_is_refused() -> None:
    hidden, weight, targets = draw()
    loss = cross_entropy_sum(hidden.requires_grad_(), weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward through the chunked loss a second time"):
        loss.backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_step_gives_the_same(dtype: torch.dtype) -> None:
    # The shape checks of these tests stay outside what is compiled.
    compiled = torch.compile(inspect.unwrap(softmax_step), dynamic=False)
    logits, targets = torch.randn(7, 11).to(dtype), torch.tensor([0, 10, IGNORE_INDEX, 3, 3, 9, 1])
    torch.testing.assert_close(compiled(logits.clone(), targets), softmax_step(logits, targets))


def test_gradients_scale_with_that_of_the_sum() -> None:
    once = run(draw(), cross_entropy_sum)
    half = run(draw(), lambda *case: cross_entropy_sum(*case) / 2)
    torch.testing.assert_close(half.hidden_grad, once.hidden_grad / 2)
    torch.testing.assert_close(half.weight_grad, once.weight_grad / 2)


def test_a_sum_over_two_batches_is_the_sum_of_both() -> None:
    hidden, weight, targets = without_some_targets()
    parts = (
        cross_entropy_sum(hidden[:1], weight, targets[:1]),
        cross_entropy_sum(hidden[1:], weight, targets[1:]),
    )
    torch.testing.assert_close(sum(parts), cross_entropy_sum(hidden, weight, targets))


def test_a_uniform_guess_costs_ln_v() -> None:
    loss = cross_entropy_sum(torch.zeros(2, 5, 12), torch.ones(11, 12), draw().targets)
    assert loss.item() == pytest.approx(10 * math.log(11))


@pytest.mark.parametrize("learns", [(True, False), (False, True)], ids=["hidden", "weight"])
def test_one_side_may_be_frozen(learns: tuple[bool, bool]) -> None:
    hidden, weight, targets = draw()
    hidden.requires_grad_(learns[0])
    weight.requires_grad_(learns[1])
    cross_entropy_sum(hidden, weight, targets).backward()
    assert (hidden.grad is not None, weight.grad is not None) == learns


def test_no_gradient_is_made_without_autograd() -> None:
    hidden, weight, targets = draw()
    expected = cross_entropy_sum(hidden, weight, targets)
    with torch.inference_mode():
        assert torch.equal(cross_entropy_sum(hidden, weight, targets), expected)


# Precision


def test_confident_tokens_are_confident() -> None:
    hidden, weight, targets = confident()
    share = (hidden @ weight.T).softmax(dim=2).gather(2, targets.unsqueeze(2))
    assert share.mean().item() == pytest.approx(0.9993, abs=5e-5)


@pytest.mark.parametrize("step", [softmax_step, pytest.param(native_softmax_step, marks=native)])
def test_confident_tokens_have_the_right_gradient_in_bf16(step: Step) -> None:
    expected, result = run(confident(), cross_entropy_sum), run_in_bf16(confident(), step)
    assert relative_error(result.hidden_grad, expected.hidden_grad) < 0.05
    assert relative_error(result.weight_grad, expected.weight_grad) < 0.05
    assert relative_error(result.loss, expected.loss) < 0.05


def test_confident_tokens_show_a_softmax_in_bf16_to_be_wrong() -> None:
    expected = run(confident(), cross_entropy_sum)
    unsound = run_in_bf16(confident(), softmax_step_in_bf16)
    assert relative_error(unsound.hidden_grad, expected.hidden_grad) > 0.5


def test_the_loss_is_not_rounded_under_autocast() -> None:
    result = run_in_bf16(draw())
    assert result.loss.dtype == torch.float32
    assert result.loss != result.loss.bfloat16()
    assert relative_error(result.loss, run(draw(), cross_entropy_sum).loss) < 0.01


def test_gradients_have_the_types_of_their_tensors() -> None:
    case = Case(draw().hidden.bfloat16(), draw().weight, draw().targets)
    result = run_in_bf16(case)
    assert result.hidden_grad.dtype == torch.bfloat16
    assert result.weight_grad.dtype == torch.float32


def test_the_heads_gradient_is_summed_over_chunks_in_fp32() -> None:
    # A sum of equal terms in bf16 stops growing at 256 of them.
    case = Case(torch.ones(2, 200, 12), torch.zeros(11, 12), torch.zeros(2, 200, dtype=torch.int64))
    expected = run(case, cross_entropy_sum)
    with torch.autocast("cpu", torch.bfloat16):
        result = run(case, cross_entropy_sum, 1)
    assert relative_error(result.weight_grad, expected.weight_grad) < 0.01


# Shift


def test_each_position_is_scored_against_the_next_token() -> None:
    inputs, targets = shift(torch.arange(12).view(2, 6), torch.arange(20, 32).view(2, 6))
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10]]
    assert targets.tolist() == [[21, 22, 23, 24, 25], [27, 28, 29, 30, 31]]
