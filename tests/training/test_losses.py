"""Losses in closed form against autograd over whole logits; every form of the teacher against exact KL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from archsearch.training import losses
from archsearch.training.losses import Weighted, backward_logits, hidden_term, next_tokens
from archsearch.training.targets import (
    IGNORED,
    Dense,
    HeadProducts,
    MeanRow,
    NextToken,
    Target,
    TopK,
)
from archsearch.training.teacher_logits import FORMS

POSITIONS, SIZE, VOCABULARY = 13, 6, 11


class Case:
    """Hidden states and heads of a teacher and a student, drawn at random."""

    def __init__(self, seed: int = 0, *, own_head: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.theirs_MC, self.ours_MC = 2 * draw(POSITIONS, SIZE), 2 * draw(POSITIONS, SIZE)
        self.theirs_VC = draw(VOCABULARY, SIZE)
        self.ours_VC = draw(VOCABULARY, SIZE) if own_head else self.theirs_VC.clone()
        self.labels_M = torch.randint(VOCABULARY, (POSITIONS,), generator=generator)
        self.labels_M[[2, 7]] = IGNORED

    @property
    def products(self) -> HeadProducts:
        """The teacher's head."""
        return HeadProducts(self.theirs_VC, torch.float32)

    def form(self, name: str, top_k: int = VOCABULARY) -> Target:
        """The teacher in one of the forms that are kept."""
        form = FORMS[name]
        return form.target(form.keep(self.theirs_MC, self.products, top_k), self.products)

    def found(
        self, terms: list[Weighted], *, trains_head: bool = True, extra: Tensor | None = None
    ) -> list[Tensor]:
        """Loss, gradient of what made the hidden states, and of the head."""
        leaf = self.ours_MC.clone().requires_grad_(True)
        head = nn.Linear(SIZE, VOCABULARY, bias=False)
        head.weight.data.copy_(self.ours_VC)
        head.requires_grad_(trains_head)
        loss = backward_logits(leaf * 2, head, terms, torch.float32, extra)
        assert leaf.grad is not None
        return [loss, leaf.grad, *([head.weight.grad] if head.weight.grad is not None else [])]

    def expected(self, loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        """The same by autograd; loss_of takes log p and log q [M, V]."""
        leaf = self.ours_MC.clone().requires_grad_(True)
        weight = self.ours_VC.clone().requires_grad_(True)
        log_p = (self.theirs_MC @ self.theirs_VC.T).log_softmax(-1)
        loss = loss_of(log_p, (leaf * 2 @ weight.T).log_softmax(-1))
        loss.backward()
        assert leaf.grad is not None
        assert weight.grad is not None
        return [loss.detach(), leaf.grad, weight.grad]


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Mean KL."""
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")


def assert_all_close(found: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    for one, other in zip(found, expected, strict=False):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_kl_and_its_gradients_are_those_of_whole_logits(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(losses.LOGIT_BYTES, "cpu", chunk * 4 * VOCABULARY)
    case = Case()
    found = case.found([Weighted(case.form("hidden"), 1.0)])
    assert len(found) == 3
    assert_all_close(found, case.expected(kl))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [4, 100])
def test_every_form_of_the_teacher_is_exact_kl_where_nothing_is_left_out(
    form: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(losses.LOGIT_BYTES, "cpu", chunk * 4 * VOCABULARY)
    case = Case(1, own_head=False)
    found = case.found([Weighted(case.form(form), 1.0)], trains_head=False)
    assert len(found) == 2
    # Log-probabilities are kept in half precision.
    tolerance = {"atol": 2e-3, "rtol": 2e-3} if form == "topk" else {"atol": 1e-5, "rtol": 1e-5}
    assert_all_close(found, case.expected(kl), **tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_a_student_that_is_the_teacher_has_neither_loss_nor_gradient(form: str) -> None:
    case = Case(2, own_head=False)
    case.ours_MC = case.theirs_MC / 2
    loss, gradient = case.found([Weighted(case.form(form), 1.0)], trains_head=False)
    slack = 2e-3 if form == "topk" else 2e-6
    assert abs(float(loss)) < slack
    assert float(gradient.abs().max()) < slack


def test_top_k_is_kl_with_the_other_tokens_as_one() -> None:
    case, top_k = Case(3), 4
    case.theirs_MC, case.ours_MC = 0.3 * case.theirs_MC, 0.3 * case.ours_MC

    def coarse(log_p: Tensor, log_q: Tensor) -> Tensor:
        tokens = log_p.topk(top_k).indices
        parts = []
        for log_of in (log_p, log_q):
            inside = log_of.gather(1, tokens)
            tail = log_of.exp().scatter(1, tokens, 0.0).sum(-1, keepdim=True).log()
            parts.append(torch.cat((inside, tail), 1))
        return kl(*parts)

    found = case.found([Weighted(case.form("topk", top_k), 1.0)])
    assert_all_close(found, case.expected(coarse), atol=3e-3, rtol=3e-3)
    whole = case.found([Weighted(case.form("hidden"), 1.0)])
    assert 0 < float(found[0]) < float(whole[0])


def test_top_k_survives_a_student_without_a_tail() -> None:
    case = Case(4)
    case.ours_MC = case.ours_MC * 1e3
    loss, gradient, _ = case.found([Weighted(case.form("topk", 4), 1.0)])
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(gradient).all())


def test_terms_add_up() -> None:
    case = Case(5)
    labelled = case.labels_M != IGNORED

    def both(log_p: Tensor, log_q: Tensor) -> Tensor:
        ce = F.nll_loss(log_q[labelled], case.labels_M[labelled], reduction="sum") / POSITIONS
        return 0.7 * kl(log_p, log_q) + 0.4 * ce

    terms = [Weighted(case.form("hidden"), 0.7), Weighted(NextToken(case.labels_M), 0.4)]
    assert_all_close(case.found(terms), case.expected(both))


@pytest.mark.parametrize("form", ["topk", "mean_row"])
def test_forms_add_up_with_the_next_token_too(form: str) -> None:
    case = Case(6, own_head=False)
    pieces = [Weighted(case.form(form), 0.5), Weighted(NextToken(case.labels_M), 0.25)]
    together = case.found(pieces, trains_head=False)
    apart = [case.found([piece], trains_head=False) for piece in pieces]
    assert_all_close(together, [sum(parts) for parts in zip(*apart, strict=True)])


def test_hidden_error_is_relative_and_has_its_gradient() -> None:
    case = Case(7)
    leaf = case.ours_MC.clone().requires_grad_(True)
    expected = 0.3 * (leaf - case.theirs_MC).square().sum() / case.theirs_MC.square().sum()
    expected.backward()
    loss, gradient = hidden_term(case.ours_MC, case.theirs_MC, 0.3)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, leaf.grad)
    terms = [Weighted(case.form("hidden"), 1.0)]
    plain, pulled = case.found(terms), case.found(terms, extra=gradient)
    # The hidden states are twice the leaf.
    torch.testing.assert_close(pulled[1] - plain[1], 2 * gradient, atol=1e-6, rtol=1e-5)


def test_a_head_that_already_has_a_gradient_keeps_it() -> None:
    case = Case(8)
    head = nn.Linear(SIZE, VOCABULARY, bias=False)
    head.weight.data.copy_(case.ours_VC)
    head.weight.grad = torch.ones_like(head.weight)
    hidden = case.ours_MC.clone().requires_grad_(True)
    backward_logits(hidden * 2, head, [Weighted(case.form("hidden"), 1.0)], torch.float32)
    expected = case.found([Weighted(case.form("hidden"), 1.0)])[2] + 1
    torch.testing.assert_close(head.weight.grad, expected)


def test_sums_over_a_large_vocabulary_keep_their_precision() -> None:
    generator = torch.Generator().manual_seed(11)
    hidden_2MC = torch.randn(2, 256, SIZE, generator=generator)
    weight_VC = torch.randn(20_000, SIZE, generator=generator)
    products = HeadProducts(weight_VC, torch.float32)
    head = nn.Linear(SIZE, len(weight_VC), bias=False).requires_grad_(False)
    head.weight.data = weight_VC
    log_p, log_q = ((h.double() @ weight_VC.double().T).log_softmax(-1) for h in hidden_2MC)
    expected = float(kl(log_p, log_q))
    for name in ("hidden", "mean_row"):
        kept = FORMS[name].keep(hidden_2MC[0], products, 0)
        terms = [Weighted(FORMS[name].target(kept, products), 1.0)]
        ours = hidden_2MC[1].clone().requires_grad_(True)
        loss = backward_logits(ours, head, terms, torch.float32)
        assert float(loss) == pytest.approx(expected, rel=1e-5), name


def test_labels_are_the_next_tokens_of_a_row_or_document() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 3, 2, 1]])
    assert next_tokens(ids).tolist() == [6, 7, 8, IGNORED, 3, 2, 1, IGNORED]
    starts = torch.tensor([[True, False, True, False], [True, False, False, True]])
    assert next_tokens(ids, starts).tolist() == [6, IGNORED, 8, IGNORED, 3, 2, IGNORED, IGNORED]


def test_bf16_hidden_states_give_logits_in_full_precision() -> None:
    case = Case(9)
    half = HeadProducts(case.theirs_VC.bfloat16(), torch.bfloat16)
    logits = half.logits(case.theirs_MC.bfloat16())
    expected = case.theirs_MC.bfloat16().double() @ case.theirs_VC.bfloat16().double().T
    torch.testing.assert_close(logits, expected.float())


def test_targets_are_of_their_protocol() -> None:
    case = Case(10)
    made = [case.form(name) for name in FORMS]
    assert [type(target) for target in made] == [Dense, MeanRow, TopK]
