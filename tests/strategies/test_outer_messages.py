import pytest
import torch

from roundelay.strategies.outer_messages import OuterMessages
from roundelay.weights import Flat

SIZE = 4
ROW = dict.fromkeys(range(SIZE), 1 / SIZE)


def flat(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    made = Flat([torch.empty(40, 10), torch.empty(7)])
    for part in made.parts:
        part.copy_(torch.randn(len(part), generator=generator) * scale)
    return made


def learners(compress, *, in_step=True):
    return [OuterMessages(compress, flat(0), in_step=in_step) for _ in range(SIZE)]


def one_round(messages, phis, steps, lost=()):
    """Every learner steps from phi to y, sends, and mixes; `lost` are (receiver, sender) whose message does not come."""
    ys = [flat(0) for _ in messages]
    for y, phi, step in zip(ys, phis, steps, strict=True):
        y.parts[0].copy_(phi.parts[0] + step.parts[0])
    sent = [message.encode(y, phi) for message, y, phi in zip(messages, ys, phis, strict=True)]
    took_part = []
    for rank, message in enumerate(messages):
        came = {peer: sent[peer] for peer in ROW if peer != rank and (rank, peer) not in lost}
        took_part.append(message.mix(ROW, rank, came, ys[rank], phis[rank]))
    return ys, took_part


def total(flats):
    return sum(each.parts[0].double() for each in flats)


@pytest.mark.parametrize("compress", [None, "int8"])
def test_the_sum_over_learners_does_not_change_in_a_round(compress):
    phis = [flat(rank) for rank in range(SIZE)]
    ys, _ = one_round(learners(compress), phis, [flat(10 + rank, 0.1) for rank in range(SIZE)])
    torch.testing.assert_close(total(phis), total(ys), rtol=0, atol=1e-5)


def test_int8_brings_replicas_together_up_to_its_rounding():
    phis = [flat(rank) for rank in range(SIZE)]
    for step in range(3):
        one_round(learners("int8"), phis, [flat(step, 0.0) for _ in range(SIZE)])
    spread = torch.stack([phi.parts[0] for phi in phis]).std(dim=0)
    assert spread.max() < 4 / 127, "the largest numbers are about 3 or 4"
    assert spread.max() > 0


def test_top_k_learners_apply_what_was_sent_and_keep_the_rest():
    """sum of changes of phi + sum of what is kept back = sum of steps: nothing is lost, at any time."""
    messages, phis = learners("top-k"), [flat(0) for _ in range(SIZE)]
    first, steps_so_far = total(phis), 0
    for round in range(10):
        steps = [flat(10 * round + rank, 0.1) for rank in range(SIZE)]
        one_round(messages, phis, steps)
        steps_so_far = steps_so_far + total(steps)
        kept = sum(message._feedback.residual[0].double() for message in messages)
        torch.testing.assert_close(total(phis) - first + kept, steps_so_far, rtol=0, atol=1e-5)
        assert all(torch.equal(phi.storage, phis[0].storage) for phi in phis), "the same bits everywhere"


def test_top_k_after_a_missed_message_sends_in_full_once_and_then_goes_on():
    messages, phis = learners("top-k"), [flat(0) for _ in range(SIZE)]
    steps = [flat(1 + rank, 0.1) for rank in range(SIZE)]
    one_round(messages, phis, steps, lost={(2, 1)})
    assert not messages[2].in_step
    assert not torch.equal(phis[2].storage, phis[0].storage)
    _, took_part = one_round(messages, phis, steps)
    assert took_part[2] == []
    assert took_part[0] == [1, 3]
    one_round(messages, phis, steps)
    assert all(torch.equal(phi.storage, phis[0].storage) for phi in phis)
    one_round(messages, phis, steps)
    assert all(message.nbytes < 300 for message in messages), "in full, a message has 1700 bytes"
    assert all(torch.equal(phi.storage, phis[0].storage) for phi in phis)


def test_a_missing_neighbour_counts_with_the_own_weights():
    phis = [flat(rank) for rank in range(SIZE)]
    ys, _ = one_round(learners(None), phis, [flat(5, 0.0)] * SIZE, lost={(0, 3)})
    expected = (2 * ys[0].parts[0] + ys[1].parts[0] + ys[2].parts[0]) / 4
    torch.testing.assert_close(phis[0].parts[0], expected)


@pytest.mark.parametrize("compress", [None, "int8"])
def test_non_finite_weights_are_refused(compress):
    messages, phis = learners(compress), [flat(rank) for rank in range(SIZE)]
    steps = [flat(rank, 0.1) for rank in range(SIZE)]
    steps[1].parts[0][3] = float("inf")
    _, took_part = one_round(messages, phis, steps)
    assert took_part[0] == [2, 3]
    assert messages[0].refused == [1]
    assert torch.isfinite(phis[0].parts[0]).all()


def test_the_distance_to_neighbours_is_measured():
    messages, phis = learners(None), [flat(rank) for rank in range(SIZE)]
    ys, _ = one_round(messages, phis, [flat(9, 0.0)] * SIZE)
    exact = (
        sum(float((ys[0].storage.view(torch.float32) - y.storage.view(torch.float32)).square().sum()) for y in ys) / 3
    )
    assert messages[0].disagreement2 == pytest.approx(exact, rel=1e-5)
