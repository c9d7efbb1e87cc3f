"""Times of a deployment against figures worked out by hand: see `serving_support`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optimizer.cost.deployment import DeploymentError, plain_roofline
from tests.optimizer.cost.serving_support import DENSE, DEVICE, SPARSE, deployment

MATRICES = 10 * (3_000_000 + 12_000_000)
HEAD = 50_000_000


def test_a_decode_step_reads_its_matrices_and_its_context() -> None:
    found = deployment().decode()
    assert found.dense == pytest.approx(2 * (MATRICES + HEAD) / 1e12)
    assert found.experts == 0 and found.exchange == 0 and found.exchanges == 0
    kv = 10 * 2 * 5 * 100 * 2  # bytes of a token
    assert found.context == pytest.approx(10 * 1250 * kv / 1e12)
    assert found.attention == pytest.approx(10 * 1250 * 4 * 10 * 100 * 10 / 1e14)
    assert found.layers == pytest.approx(10e-6) and found.floor == pytest.approx(found.dense + found.context)


def test_a_prompt_multiplies() -> None:
    found = deployment().prefill()
    assert found.dense == pytest.approx((2 * 1000 * MATRICES + 2 * HEAD) / 1e14), "logits of its last token alone"
    assert found.attention == pytest.approx(1000 * 500 * 4 * 10 * 100 * 10 / 1e14), "half of the positions on average"


def test_fewer_bits_read_less_and_multiply_faster_where_the_device_can() -> None:
    whole, eight = deployment(), deployment(weights="fp8", kv="fp8")
    assert eight.decode().context == pytest.approx(whole.decode().context / 2)
    assert eight.decode().dense == pytest.approx((MATRICES + 2 * HEAD) / 1e12), "the head stays bfloat16"
    assert eight.prefill().dense == pytest.approx((2 * 1000 * MATRICES / 2 + 2 * HEAD) / 1e14)
    four = deployment(weights="fp4")
    assert four.prefill().dense == pytest.approx(whole.prefill().dense), "this device widens four bits"
    native = deployment(weights="fp4", device=replace(DEVICE, gemm_fp4_flops=4e14))
    assert native.prefill().dense < four.prefill().dense
    assert deployment(weights="fp4", model=replace(DENSE, four_bit_experts_only=True)).dense_weights == "bfloat16"


def test_a_step_reads_the_experts_that_its_tokens_touch() -> None:
    expert, matrices = 1_500_000, 10 * 3_000_000
    one = deployment(model=SPARSE, concurrency=1).decode()
    assert one.experts == pytest.approx(10 * 2 * expert * 2 / 1e12)
    assert one.dense == pytest.approx(2 * (matrices + HEAD) / 1e12)
    ten = deployment(model=SPARSE).decode()
    assert one.experts * 5 < ten.experts < 10 * 16 * expert * 2 / 1e12


def test_devices_share_matrices_and_keys_and_exchange() -> None:
    one, four = deployment().decode(), deployment(tensor=4).decode()
    assert four.dense == pytest.approx(one.dense / 4) and four.context == pytest.approx(one.context / 4)
    # ten layers, two all-reduces of ten rows of 1000 numbers, 3/4 of them out twice, at half of the link
    assert four.exchange == pytest.approx(10 * 2 * (10 * 1000 * 2) * 2 * 0.75 / 100e9)
    assert four.exchanges == pytest.approx(20e-6)
    ten = deployment(tensor=10)
    assert ten.kv_copies == 2 and ten.decode().context == pytest.approx(one.context / 5), (
        "five heads go to five devices"
    )


def test_ranks_share_requests_and_experts_and_nothing_else() -> None:
    one, four = deployment(model=SPARSE), deployment(model=SPARSE, ranks=4)
    assert four.decode().dense == pytest.approx(one.decode().dense)
    assert four.decode().context == pytest.approx(one.decode().context / 4)
    assert four.decode().experts == pytest.approx(one.decode().experts / 4)
    assert four.decode().exchanges == pytest.approx(20e-6) and four.weight_bytes < one.weight_bytes


def test_requests_without_room_wait() -> None:
    small = replace(DEVICE, memory=1e9)
    found = deployment(device=small, concurrency=100)
    weights = 2 * (MATRICES + 2 * HEAD)
    assert found.weight_bytes == weights and found.fits
    assert found.room == pytest.approx((0.9e9 - weights) / (1500 * 20_000))
    assert found.running == found.room and found.turned_away() == pytest.approx(100 / found.room - 1)
    assert deployment().turned_away() == 0 and not deployment(device=replace(DEVICE, memory=0.4e9)).fits


def test_a_plain_roofline_counts_the_prompts_that_come_in() -> None:
    d = deployment()
    ttft, tpot = plain_roofline(d)
    assert ttft == d.prefill().floor
    assert tpot == pytest.approx(d.decode().floor + 10 / 500 * ttft)
    assert plain_roofline(replace(d, prefill_apart=True))[1] == d.decode().floor


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [("weights", "fp3", "fp8"), ("kv", "int4", "bfloat16"), ("isl", 0, "at least 1"), ("tensor", 0, "at least 1")],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: object, named: str) -> None:
    with pytest.raises(DeploymentError, match=named) as caught:
        deployment(**{field: value})
    assert field in str(caught.value)
